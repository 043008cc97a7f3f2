"""Base models: one short file per family, built from shared layers."""
