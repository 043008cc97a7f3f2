"""Rotary position embedding, and the cache write that follows it."""
