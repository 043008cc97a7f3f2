"""Making adapters from adapters, offline: merging, and other systems' formats. Needs numpy."""
