"""The worker's own engine and the gateway's own admission and router under a virtual clock."""
