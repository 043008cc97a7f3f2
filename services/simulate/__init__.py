"""The worker's own engine and the gateway's own router under a virtual clock."""
