"""Code that every server needs."""
