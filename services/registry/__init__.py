"""The registry: adapters, versions, tags and bases, kept as objects and indexed in Redis."""
