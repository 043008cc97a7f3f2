"""Reference in float64: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight.

    Args:
        x: `[T, H]`.
        weight: `[H]`, the offset that Gemma adds included.

    Returns:
        float64 `[T, H]`.
    """
    rows = [row / (row.pow(2).mean() + eps).sqrt() * weight.double() for row in x.double()]
    return torch.stack(rows)
