"""gRPC servers and channels: limits, health checks, the interceptor of all calls."""
