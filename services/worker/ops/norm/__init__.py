"""Root-mean-square normalization with the residual added on the way."""
