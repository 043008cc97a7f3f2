"""The entry point of services, and the processes that do untrusted work."""
