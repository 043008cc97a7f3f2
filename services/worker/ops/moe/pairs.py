"""Pairs of a token and one of its experts, ordered by expert. Plain torch.

Pair t * k + r is the r-th choice of token t, where each token has k experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs in the order of their experts; inside an expert, of their tokens."""

    order: Tensor
    """int64 `[T * k]`: pair numbers."""
    ends: Tensor
    """int32 `[experts]`: where each expert's pairs end in `order`."""
    num_active: int
    """k."""


def sort_pairs(chosen: Tensor, num_experts: int) -> SortedPairs:
    """Order the pairs of int64 `[T, k]` expert numbers. Launches only."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return SortedPairs(order, ends, chosen.shape[1])
