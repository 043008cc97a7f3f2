"""Which worker runs a request, and how a stream continues on another worker."""
