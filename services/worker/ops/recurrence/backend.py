"""The interface of recurrent layers, and the states of the sequences of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.types.step_plan import StateSpan

QK_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one layer, float32."""

    taps: Tensor
    """`[channels, K]`, of the convolution."""
    rates: Tensor
    """`[Hv]`: -exp(A_log)."""
    step_bias: Tensor
    """`[Hv]`: dt_bias."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states of one step's sequences."""

    cells: Tensor
    """float32 `[blocks, cells in a block, items]`: the whole arena."""
    layout: StateLayout
    row_ends: Tensor
    """int64 `[rows]`: spans of the step's first rows together."""
    words: Tensor
    """int64 `[spans, 2]`: first token row, and the end."""
    sources: Tensor
    """int64 `[spans, cells]`: the item of the arena at which each cell begins; -1 = zeros."""
    targets: Tensor
    """int64 `[spans, cells]`."""

    def layer_cells(self, state_index: int) -> slice:
        """The cells of the layer with this index among the layers with a state."""
        return slice(
            state_index * self.layout.layer_cells, (state_index + 1) * self.layout.layer_cells
        )


def state_cells(arena: Tensor, layout: StateLayout) -> Tensor:
    """The cells of all blocks of an arena, uint8 `[blocks, bytes]`: see `StateBatch`."""
    items = arena.view(-1).view(torch.float32)
    size = len(arena), layout.block_cells, layout.cell_items
    return items.as_strided(size, (layout.block_items, layout.cell_items, 1))


def state_batch(
    rows: Sequence[Sequence[StateSpan]], cells: Tensor, layout: StateLayout
) -> StateBatch:
    """The states of a step's rows, in their order; `cells` as `StateBatch` has them."""
    spans = [span for row in rows for span in row]
    ends = list(accumulate(span.num_tokens for span in spans))
    begins = [0, *ends[:-1]]
    nowhere = [-1] * layout.num_blocks
    sources = np.array([span.source or nowhere for span in spans], dtype=np.int64)
    targets = np.array([span.target for span in spans], dtype=np.int64)
    block, slot = np.divmod(np.arange(layout.num_cells), layout.block_cells)
    offsets = slot * layout.cell_items
    from_cells = sources.reshape(len(spans), -1).take(block, axis=1)
    to_cells = targets.reshape(len(spans), -1).take(block, axis=1)
    size = layout.block_items
    from_items = np.where(from_cells < 0, -1, from_cells * size + offsets)
    return StateBatch(
        cells,
        layout,
        torch.tensor(list(accumulate(map(len, rows))), dtype=torch.int64),
        torch.tensor([begins, ends], dtype=torch.int64).T.contiguous(),
        torch.from_numpy(from_items),
        torch.from_numpy(to_cells * size + offsets),
    )


class DeltaNet(Protocol):
    """The gated delta net of one layer, between its projections."""

    def forward(self, qkv: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> Tensor:
        """Advance the states of the step, and read them: see README.

        Args:
            qkv: `[T, 2 Hk Dk + Hv Dv]`. a, b: `[T, Hv]`.

        Returns: fresh `[T, Hv Dv]`.
        """
        ...
