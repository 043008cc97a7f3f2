"""Tensor parallelism: rank 0 plans and samples, the other ranks compute the same steps."""
