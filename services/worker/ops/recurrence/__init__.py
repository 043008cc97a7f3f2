"""Gated delta nets: linear attention with a state of fixed size."""
