"""Accounting of the arena: KV blocks, the prefix cache and resident adapters. No torch."""
