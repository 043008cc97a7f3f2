"""Maintenance of the store and the index: garbage collection, rebuilds, snapshots."""
