"""Adapters from the object store to verified, packed files on the local disk."""
