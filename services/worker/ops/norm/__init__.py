"""Root-mean-square normalization, including the addition of the residual."""
