"""Connections to workers: fleet, links, sessions, token streams, and the router's view of them."""
