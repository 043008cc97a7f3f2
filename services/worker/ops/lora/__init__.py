"""Low-rank updates of a batch whose rows use different adapters."""
