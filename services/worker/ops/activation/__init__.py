"""The activation of a gated MLP."""
