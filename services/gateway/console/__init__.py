"""The console: one page over the gateway's own view of the stack."""
