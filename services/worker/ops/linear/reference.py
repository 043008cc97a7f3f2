"""Reference in float64: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, o] = sum over i of weight[o, i] x[t, i].

    Args:
        x: `[T, in]`.
        weight: `[out, in]`.

    Returns:
        float64 `[T, out]`.
    """
    return torch.stack([weight.double() @ row for row in x.double()])
