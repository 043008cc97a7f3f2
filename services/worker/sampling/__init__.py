"""Choosing tokens: counter-based noise and the sampler."""
