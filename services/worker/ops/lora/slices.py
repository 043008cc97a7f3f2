"""How an adapter's modules share a site. Plain data without torch, because packing uses it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """One module's update: rank rows of the stacked A, and the outputs they reach.

    A site's slices stack the ranks of q, k, v (or gate, up), which may differ or be absent.
    """

    rank_begin: int
    rank_len: int
    out_begin: int
    out_len: int
    scale: float
