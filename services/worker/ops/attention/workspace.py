"""Memory of the Triton kernels that the layers and steps of a runner share."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.work_items import PartialSums, make_partial_sums

HeadSizes = tuple[int, int, int]
"""Query heads, key heads and the width of a head: what the size of `PartialSums` depends on."""


def head_sizes(shape: HeadShape) -> HeadSizes:
    """The sizes that decide whether layers can share partial sums."""
    return shape.num_heads, shape.num_kv_heads, shape.block_dim


class Workspace:
    """Keeps one `PartialSums` for layers of each size, for the steps of a runner, which run one
    after another."""

    def __init__(self) -> None:
        self._sums: dict[HeadSizes, PartialSums] = {}
        self._outputs: dict[int, Tensor] = {}
        """Outputs by width. Layers run in turn, and smaller steps use parts of the largest."""

    def partial_sums(
        self, num_items: int, num_rows: int, shape: HeadShape, device: torch.device
    ) -> PartialSums:
        """Partial sums for at least that many items. A larger step replaces those that are kept;
        captured steps keep their own."""
        known = self._sums.get(head_sizes(shape))
        if known is None or not known.holds(num_items, num_rows):
            if known is not None:
                num_items = max(num_items, len(known.values))
                num_rows = max(num_rows, len(known.num_finished))
            known = make_partial_sums(num_items, num_rows, shape, device)
        self._sums[head_sizes(shape)] = known
        return known

    def padded_output(self, q: Tensor) -> Tensor:
        """An output of the shape of q. Rows that a captured step does not write are finite."""
        known = self._outputs.get(q.shape[1])
        if known is None or len(known) < len(q):
            known = self._outputs[q.shape[1]] = q.new_zeros(q.shape)
        return known[: len(q)]
