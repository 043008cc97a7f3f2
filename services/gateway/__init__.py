"""The gateway: resolves names, speaks text, admits, routes and relays streams that survive."""
