"""The interface of recurrent layers, and the states of the sequences of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.transfers import Upload
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
    """The states of one step's sequences. Each span of a row begins with the state that the span
    before it leaves."""

    cells: Tensor
    """float32 `[blocks, cells in a block, items]`: the whole arena."""
    layout: StateLayout
    row_ends: Tensor
    """int64 `[rows]`: number of spans of rows 0 to i."""
    words: Tensor
    """int64 `[spans, 2]`: first token row, and the end."""
    sources: Tensor
    """int64 `[spans, blocks of a state]`; -1 = zeros."""
    targets: Tensor
    """int64 `[spans, blocks of a state]`; -1 = the state is not kept, in idle steps on GPUs."""
    num_single: int
    """Rows at the end of the step with one token, and so one span, each."""
    longest: int
    """Tokens of the longest span of the others."""


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
    sources, targets = blocks_of(spans, layout)
    upload = Upload()
    upload.add("row_ends", np.array(list(accumulate(map(len, rows))), dtype=np.int64))
    upload.add("words", np.array([[0, *ends[:-1]], ends], dtype=np.int64).T)
    upload.add("sources", sources)
    upload.add("targets", targets)
    upload.send(cells.device)
    num_single = sum(1 for _ in takewhile(_is_single, reversed(rows)))
    others = chain.from_iterable(rows[: len(rows) - num_single])
    return StateBatch(
        cells,
        layout,
        upload["row_ends"],
        upload["words"],
        upload["sources"],
        upload["targets"],
        num_single,
        max((span.num_tokens for span in others), default=0),
    )


def blocks_of(
    spans: Sequence[StateSpan], layout: StateLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and targets of spans, as `StateBatch` has them."""
    nowhere = [-1] * layout.num_blocks
    targets = np.array([span.target for span in spans], dtype=np.int64)
    if all(span.source is span.target for span in spans):  # as in most steps that only decode
        return targets, targets
    return np.array([span.source or nowhere for span in spans], dtype=np.int64), targets


def idle_states(arena: Tensor, layout: StateLayout, num_tokens: int) -> StateBatch:
    """States of a warm-up step, which are not kept: those of a row of all tokens but the last, if
    there are several, and those of a row of the last."""
    nowhere = [-1] * layout.num_blocks
    lens = [num_tokens - 1, 1] if num_tokens > 1 else [1]
    rows = [[StateSpan(count, (), nowhere)] for count in lens]
    return state_batch(rows, state_cells(arena, layout), layout)


def _is_single(row: Sequence[StateSpan]) -> bool:
    return len(row) == 1 and row[0].num_tokens == 1


class DeltaNet(Protocol):
    """The gated delta net of one layer, between its projections."""

    def forward(self, qkv: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> Tensor:
        """Advance the states of the step, and read them: see README.

        Args:
            qkv: `[T, 2 Hk Dk + Hv Dv]`. a, b: `[T, Hv]`.

        Returns: fresh `[T, Hv Dv]`.
        """
        ...
