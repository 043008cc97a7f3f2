"""The gateway: resolves models, tokenizes, admits, routes, and relays streams to clients."""
