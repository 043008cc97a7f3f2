"""Turns adapters in the object store into verified, packed files on the local disk."""
