"""Merges adapters and converts them from other formats, offline. Needs numpy."""
