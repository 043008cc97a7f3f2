"""The clients of the registry and of the gateway."""
