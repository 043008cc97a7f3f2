"""Choosing tokens on GPUs."""
