"""Turns step plans into tensors, runs the model and returns sampled tokens."""
