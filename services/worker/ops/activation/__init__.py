"""The gate of a gated MLP."""
