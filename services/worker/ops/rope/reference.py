"""Reference in float64: one token, one head and one pair of components at a time."""

from __future__ import annotations

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(y[i], y[i + h]) = (x[i] cos - x[i + h] sin, x[i + h] cos + x[i] sin), where h is half of the
    rotated components; the rest stays.

    Args:
        x: `[T, heads, D]`.
        cos, sin: `[T, h]` of each token's position.

    Returns:
        float64 `[T, heads, D]`.
    """
    x, y = x.double(), x.double().clone()
    half = cos.shape[-1]
    for token in range(len(x)):
        for head in range(x.shape[1]):
            for i in range(half):
                c, s = cos[token, i].double(), sin[token, i].double()
                first, second = x[token, head, i], x[token, head, i + half]
                y[token, head, i] = first * c - second * s
                y[token, head, i + half] = second * c + first * s
    return y
