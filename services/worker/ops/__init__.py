"""One folder per operation: a slow reference, and the backends that are compared with it."""
