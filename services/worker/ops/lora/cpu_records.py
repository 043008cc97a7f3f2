"""The records that the C++ kernel reads: those of adapters, and the row runs of a step.

The record of an adapter is a vector of 64-bit words: number of sites; for each site its entry's
word offset, or 0. An entry is rank, address of the float32 scales, numbers of tiles of each kind,
then the tiles, six words each. `native/src/lora_segments.h` declares the same. Addresses point into
the arena and into tensors that the table keeps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.native.library import DTYPE_CODES
from loraplex_services.worker.ops.lora.tables import DeltaTable, SiteDelta, Tile

RUN_WORDS = 4


class Records:
    """The record of each slot, made when it is first used."""

    def __init__(self, table: DeltaTable, num_sites: int) -> None:
        self._table = table
        self._num_sites = num_sites
        self._records: dict[int, Tensor] = {}
        self._norm_slots: set[int] = set()
        self._row_slots: set[int] = set()

    def address(self, slot: int) -> int:
        """Address of the slot's record; valid until the slot is removed."""
        record = self._records.get(slot)
        if record is None:
            sites = range(self._num_sites)
            found = {site: self._table.get((slot, site)) for site in sites}
            deltas = {site: delta for site, delta in found.items() if delta is not None}
            record = self._records[slot] = pack_record(deltas)
            if any(delta.norm for delta in deltas.values()):
                self._norm_slots.add(slot)
            if any(delta.replaces_rows for delta in deltas.values()):
                self._row_slots.add(slot)
        return record.data_ptr()

    def trains_norms(self, slot: int) -> bool:
        """Whether the slot's adapter replaces a norm's weight."""
        self.address(slot)
        return slot in self._norm_slots

    def replaces_rows(self, slot: int) -> bool:
        """Whether the slot's adapter replaces rows of some weight."""
        self.address(slot)
        return slot in self._row_slots

    def forget(self, slot: int) -> None:
        """Drop the slot's record, because its adapter has changed or was removed."""
        self._records.pop(slot, None)
        self._norm_slots.discard(slot)
        self._row_slots.discard(slot)


def pack_record(deltas: Mapping[int, SiteDelta]) -> Tensor:
    """One adapter's entries by site id; int64."""
    num_sites = max(deltas, default=-1) + 1
    offsets, entries = [0] * num_sites, []
    position = 1 + num_sites
    for site_id, delta in sorted(deltas.items()):
        entry = _entry(delta)
        offsets[site_id] = position
        position += len(entry)
        entries.append(entry)
    words = [num_sites, *offsets, *chain.from_iterable(entries)]
    return torch.from_numpy(np.array(words, np.int64))  # torch.tensor takes three times as long


def pack_runs(runs: Sequence[tuple[int, int, int, float]]) -> Tensor:
    """int64 `[N, 4]`: record address, first row, end row, bits of the float64 coefficient."""
    words = [(address, begin, end, _bits(coef)) for address, begin, end, coef in runs]
    return torch.tensor(words, dtype=torch.int64).view(len(words), RUN_WORDS)


def _entry(delta: SiteDelta) -> list[int]:
    kinds = (delta.a, delta.b, delta.lora_biases, delta.gains, delta.biases)
    head = [delta.rank, delta.scales.data_ptr(), *map(len, kinds)]
    return [*head, *chain.from_iterable(map(_tile_words, chain.from_iterable(kinds)))]


def _tile_words(tile: Tile) -> tuple[int, ...]:
    assert tile.data.is_contiguous(), tile.data.stride()
    return (
        tile.data.data_ptr(),
        tile.row_begin,
        tile.row_end,
        tile.col_begin,
        tile.col_end,
        DTYPE_CODES[tile.data.dtype],
    )


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
