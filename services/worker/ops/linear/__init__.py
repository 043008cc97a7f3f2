"""Products with the weights of a base model."""
