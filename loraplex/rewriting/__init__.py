"""Makes adapters from adapters, offline: merging and conversion from other formats. Needs numpy."""
