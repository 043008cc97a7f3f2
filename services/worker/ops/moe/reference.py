"""Reference in float64: one pair of a token and an expert at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """y[p] = W[experts[p]] x[p].

    Args:
        x: `[P, in]`, the input of each pair.
        weights: `[num_experts, out, in]`.
        experts: int64 `[P]`, the expert of each pair.

    Returns:
        float64 `[P, out]`.
    """
    pairs = zip(x.double(), experts.tolist(), strict=True)
    return torch.stack([weights[expert].double() @ row for row, expert in pairs])


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] y[t, k].

    Args:
        y: `[T, K, H]`, the result of each token's experts.
        weights: `[T, K]`.

    Returns:
        float64 `[T, H]`.
    """
    out = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float64, device=y.device)
    for token in range(y.shape[0]):
        for choice in range(y.shape[1]):
            out[token] += weights[token, choice].double() * y[token, choice].double()
    return out
