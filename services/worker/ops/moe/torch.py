"""The choice of experts in torch on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ChooseExperts = Callable[[Tensor, int, bool, Tensor | None], tuple[Tensor, Tensor]]
"""See `choose_experts`."""


def choose_experts(
    scores: Tensor, num_active: int, renormalise: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row, int64 `[T, k]`, and their weights, float32 `[T, k]`.

    Args:
        scores: `[T, experts]`; a weight is their softmax.
        num_active: k, the number of largest weights.
        renormalise: whether the weights of a row's experts add up to 1.
        factors: what their weights are multiplied by then, float32 `[experts]`; None = nothing.
    """
    probs = scores.softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probs.topk(num_active, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights if factors is None else weights * factors[chosen]
