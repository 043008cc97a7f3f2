"""The update of an adapter at one site, as views of its tiles in the arena. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex_services.worker.transfers import to_device
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


class StoredRows:
    """The rows of a matrix that is looked up by row, as an embedding is.

    A tile ends with its block of the arena, so the table of a vocabulary may have a thousand of
    them: rows are found without a loop over tiles, and without the host waiting for the device.
    """

    def __init__(self, tiles: Sequence[Tile]) -> None:
        """`tiles` are views of one buffer, in the order of their rows for each span of columns."""
        by_columns: dict[int, list[Tile]] = {}
        for tile in tiles:
            by_columns.setdefault(tile.col_begin, []).append(tile)
        self.num_rows = max(tile.row_end for tile in tiles)
        self._parts = [_part(by_columns[begin]) for begin in sorted(by_columns)]

    def take(self, indices: Tensor) -> Tensor:
        """int64 `[n]`, each below `num_rows` -> `[n, width]`, in the dtype of the tiles."""
        parts = []
        for first_rows, begins, windows in self._parts:
            tiles = torch.searchsorted(first_rows, indices, right=True) - 1
            rows = indices - first_rows[tiles]
            parts.append(windows[begins[tiles] + rows * windows.shape[1]])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _part(tiles: Sequence[Tile]) -> tuple[Tensor, Tensor, Tensor]:
    """The first row of each tile, where it begins in the buffer, and what begins at each element of
    the buffer: `[elements, width]`, rows that overlap."""
    data, device = [tile.data for tile in tiles], tiles[0].data.device
    storage, width = data[0].untyped_storage(), data[0].shape[1]
    assert {each.untyped_storage().data_ptr() for each in data} == {storage.data_ptr()}
    num_windows = storage.nbytes() // data[0].itemsize - width + 1
    numbers = torch.tensor([[t.row_begin for t in tiles], [d.storage_offset() for d in data]])
    first_rows, begins = to_device(numbers, device)
    return first_rows, begins, data[0].as_strided((num_windows, width), (1, 1), 0)


@dataclass(frozen=True)
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

    @cached_property
    def stored_a(self) -> StoredRows:
        """A^T at the embedding."""
        return StoredRows(self.a)

    @cached_property
    def stored_rows(self) -> StoredRows:
        """`rows` at the embedding."""
        return StoredRows(self.rows)

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
