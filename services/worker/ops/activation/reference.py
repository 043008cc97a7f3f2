"""Reference in float64: the activation of a gated MLP by its formula."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """y[t, i] = silu(x[t, i]) * x[t, F + i], where silu(z) = z / (1 + exp(-z)).

    Args:
        gate_up: `[T, 2 F]`.

    Returns:
        float64 `[T, F]`.
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up
