"""The update of an adapter at one site, as views of its tiles in the arena. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex_services.worker.types.sites import Slice as Slice


class Tile(NamedTuple):
    """A rectangle of a matrix: rank rows [row_begin, row_end), columns [col_begin, col_end).

    For A, columns are inputs; for B, outputs of the whole site.
    """

    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    data: Tensor
    """`[row_end - row_begin, col_end - col_begin]`, contiguous, a view of the arena."""


@dataclass(frozen=True, slots=True)
class SiteDelta:
    """Everything an adapter does at one site."""

    slices: tuple[Slice, ...]
    a: tuple[Tile, ...]
    """The stacked A `[rank, in]`; at the embedding A^T, `[vocabulary, rank]`, by token id."""
    b: tuple[Tile, ...]
    """B as rank rows `[rank, out]`, defined where the slices say."""
    scales: Tensor
    """float32 `[rank]`: each slice's scale on its rank rows, times the row's factors of A and B
    where they are integers."""
    lora_biases: tuple[Tile, ...] = ()
    """float32 `[1, out]`: bias of B times its scale; 0 elsewhere."""
    gains: tuple[Tile, ...] = ()
    """float32 `[1, out]` where DoRA rescales outputs; 1 elsewhere."""
    biases: tuple[Tile, ...] = ()
    """float32 `[1, out]`: trained bias minus the base's; 0 elsewhere."""
    norm: tuple[Tile, ...] = ()
    """float32 `[1, width]`: a norm's weight (offset included) that replaces the base's."""
    rows: tuple[Tile, ...] = ()
    """`[changed, width]`: rows of the weight that replace the base's."""
    row_ids: Tensor | None = None
    """int64 `[changed]`, ascending: whose rows these are."""
    num_rows: int = 0
    """Tokens of the adapter's own embedding and head; 0 = as many as the base's."""

    @property
    def replaces_rows(self) -> bool:
        """Whether the weight under the update is not the base's."""
        return self.row_ids is not None or self.num_rows > 0

    @property
    def is_int8(self) -> bool:
        """Whether A and B are integers."""
        return any(tile.data.dtype is torch.int8 for tile in self.a)

    @property
    def rank(self) -> int:
        """Rows of the stacked A."""
        return sum(part.rank_len for part in self.slices)


DeltaTable = Mapping[tuple[int, int], SiteDelta]
"""(slot, site id) -> what the adapter adds there; sparse."""
