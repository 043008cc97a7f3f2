"""Attention over the paged KV cache: one interface with several backends."""
