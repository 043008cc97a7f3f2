"""Keeping the store and the index in order: garbage collection, rebuilds, snapshots."""
