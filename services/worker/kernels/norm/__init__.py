"""Root-mean-square normalisation with the residual added on the way."""
