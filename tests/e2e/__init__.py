"""A package, so that the shared stack can end with the last test of this folder."""
