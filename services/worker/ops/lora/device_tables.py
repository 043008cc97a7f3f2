"""The adapters' tables on the device: fixed addresses, changed in stream order, read by kernels.

`index[slot, part]` is (first group, number of groups, first vector, number of vectors) in
`records`: an adapter without a module has none there. See `device_records` for what a record says.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from loraplex.errors import ResourceExhausted
from loraplex_services.worker.ops.lora.device_records import (
    INDEX_WORDS,
    RECORD_BYTES,
    RECORD_WORDS,
    AdapterRecords,
    OutputRange,
)
from loraplex_services.worker.transfers import copy_into

ALIGNED_ELEMENTS = 16
"""Elements of which widths are multiples where kernels load vectors."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """The facts about a site that launches need."""

    num_inputs: int
    parts: tuple[OutputRange, ...]
    """Ascending and without gaps; together the site's outputs."""
    is_aligned: bool = False
    """Whether all widths are multiples of `ALIGNED_ELEMENTS`."""
    may_be_cut: bool = True
    """Whether rows of matrices may be longer than a block, and slices end inside of parts."""


class DeviceTables:
    """Records of all resident adapters, allocated once."""

    def __init__(
        self,
        arena: Tensor,
        dtype: torch.dtype,
        shapes: Sequence[SiteShape],
        max_resident: int,
        max_records: int,
    ) -> None:
        """
        Args:
            arena: uint8 `[bytes]`.
            dtype: of all adapters' A and B.
            shapes: by site id; a site that kernels do not serve has no parts.
        """
        self.arena = arena
        self.matrices = arena.view(dtype)
        self.vectors = arena.view(torch.float32)
        self.shapes = tuple(shapes)
        self.parts = [part for shape in shapes for part in shape.parts]
        counts = [len(shape.parts) for shape in shapes]
        self.first_part = [0, *accumulate(counts)][: len(counts)]
        """By site id: the index of its first part in `parts`."""
        self.index = torch.zeros(
            (max_resident, len(self.parts), INDEX_WORDS), dtype=torch.int32, device=arena.device
        )
        self.records = torch.zeros(
            (max_records, RECORD_WORDS), dtype=torch.int64, device=arena.device
        )
        self._segments = Segments(max_records)
        self._entered: dict[int, EnteredRecords] = {}

    @property
    def is_int8(self) -> bool:
        """Whether A and B are integers."""
        return self.matrices.dtype is torch.int8

    @property
    def max_parts(self) -> int:
        """Parts of the site that has most."""
        return max(len(shape.parts) for shape in self.shapes)

    def enter_records(
        self,
        slot: int,
        adapter: AdapterRecords,
        starts: Sequence[int],
        in_torch: Set[int],
        trains_norms: bool,
    ) -> None:
        """Write an adapter's records, then its rows of the index.

        Args:
            adapter: made for the parts of these tables.
            starts: byte offset in the arena of each block that the records count from.
            in_torch: sites whose deltas kernels do not apply (embeddings, norms, replaced rows).
            trains_norms: whether the adapter brings a norm's weight.

        Raises:
            ResourceExhausted: when the records do not fit; nothing is entered then.
        """
        assert len(adapter.index) == len(self.parts), (adapter.index.shape, len(self.parts))
        length = len(adapter.data)
        begin = self._segments.allocate(length)
        if length:
            data = adapter.relocated(starts, self.records.data_ptr() + begin * RECORD_BYTES)
            copy_into(self.records[begin : begin + length], torch.from_numpy(data))
        index = adapter.index + np.array((begin, 0, begin, 0), np.int32)
        copy_into(self.index[slot], torch.from_numpy(index))
        most = index.max(axis=0, initial=0)
        self._entered[slot] = EnteredRecords(
            begin, length, adapter.sites, in_torch, trains_norms, int(most[1]), int(most[3])
        )

    def remove(self, slot: int) -> None:
        """Take an adapter out; its records may be reused at once."""
        entered = self._entered.pop(slot)
        self.index[slot].fill_(0)
        self._segments.release(entered.begin, entered.num_records)

    def entered(self, slot: int) -> EnteredRecords:
        """The entries of the adapter in a slot."""
        return self._entered[slot]


@dataclass(frozen=True, slots=True)
class EnteredRecords:
    """The entries of one adapter in the tables."""

    begin: int
    num_records: int
    sites: frozenset[int]
    """Sites where kernels have something to add."""
    in_torch: Set[int]
    """Sites whose deltas kernels do not apply."""
    trains_norms: bool
    """Whether it replaces a norm's weight."""
    max_groups: int
    """Groups of the part where it has most."""
    max_vectors: int
    """Vector records of the part where it has most."""


class Segments:
    """First-fit allocation of index ranges. Pure arithmetic."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)]

    def allocate(self, length: int) -> int:
        """Begin of a free range.

        Raises:
            ResourceExhausted: when no range is long enough.
        """
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                self._free[i : i + 1] = [(begin + length, end)] if begin + length < end else []
                return begin
        raise ResourceExhausted(
            f"adapter tables of {self._capacity} records have no room for {length} more; "
            "unload adapters, or lower max_resident"
        )

    def release(self, begin: int, length: int) -> None:
        """Give a range back; neighbours join."""
        if length == 0:
            return
        joined: list[tuple[int, int]] = []
        for range_begin, range_end in sorted([*self._free, (begin, begin + length)]):
            if joined and joined[-1][1] == range_begin:
                joined[-1] = joined[-1][0], range_end
            else:
                joined.append((range_begin, range_end))
        self._free = joined
