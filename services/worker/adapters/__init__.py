"""Adapters on their way from the object store to the device."""
