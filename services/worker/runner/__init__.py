"""A step plan becomes tensors, runs through the model and comes back as sampled tokens."""
