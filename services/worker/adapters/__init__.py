"""Moves adapters from the object store to the device."""
