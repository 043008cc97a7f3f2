"""The adapters' tables on the device: fixed addresses, changed in stream order, read by kernels.

`index[slot, site]` is the place of an entry in `records`, or -1: compressed rows, since an adapter
without a module has nothing there but the -1. See `device_records` for what a record says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.errors import ResourceExhausted
from services.worker.kernels.lora.device_records import RECORD_WORDS, RecordBuilder
from services.worker.kernels.lora.tables import SiteDelta
from services.worker.transfers import copy_into


class DeviceTables:
    """Entries of all resident adapters, allocated once."""

    def __init__(
        self,
        arena: Tensor,
        in_features: Sequence[int],
        is_aligned: Sequence[bool],
        max_resident: int,
        max_records: int,
        int8: bool = False,
    ) -> None:
        """
        Args:
            arena: uint8 `[bytes]`, what record offsets count from.
            in_features: input width of each site, by site id.
            is_aligned: by site id, whether each tile row starts at a multiple of 16 elements, so
                that kernels may load vectors.
            int8: whether all adapters' A and B are integers.
        """
        self.int8 = int8
        self.arena = arena
        self.is_aligned = tuple(is_aligned)
        self.in_features = torch.tensor(in_features, dtype=torch.int32, device=arena.device)
        self.index = torch.full(
            (max_resident, len(in_features)), -1, dtype=torch.int32, device=arena.device
        )
        self.records = torch.zeros(
            (max_records, RECORD_WORDS), dtype=torch.int64, device=arena.device
        )
        self._segments = Segments(max_records)
        self._held: dict[int, Held] = {}

    @property
    def num_sites(self) -> int:
        """Sites of the model."""
        return self.index.shape[1]

    def enter(self, slot: int, deltas: Mapping[int, SiteDelta], in_torch: Set[int]) -> None:
        """Write an adapter's records, then its row of the index.

        Args:
            deltas: by site id; tiles are views of the arena.
            in_torch: sites whose deltas kernels do not apply (embeddings, norms, replaced rows).

        Raises:
            ResourceExhausted: when the records do not fit; nothing is entered then.
        """
        builder = RecordBuilder(self.arena.data_ptr())
        for site_id, delta in deltas.items():
            if site_id not in in_torch:
                builder.add_site(site_id, delta)
        begin = self._segments.allocate(len(builder.records))
        for record, word in builder.links:
            builder.records[record][word] += begin
        if builder.records:
            rows = torch.tensor(builder.records, dtype=torch.int64)
            copy_into(self.records[begin : begin + len(rows)], rows)
        row = torch.full((self.num_sites,), -1, dtype=torch.int32)
        for site_id, entry in builder.entries.items():
            row[site_id] = begin + entry
        copy_into(self.index[slot], row)
        self._held[slot] = Held(
            begin,
            len(builder.records),
            frozenset(builder.entries),
            in_torch,
            any(delta.norm for delta in deltas.values()),
            max((deltas[site].rank for site in builder.entries), default=0),
        )

    def remove(self, slot: int) -> None:
        """Take an adapter out; its records may be reused at once."""
        held = self._held.pop(slot)
        self.index[slot].fill_(-1)
        self._segments.release(held.begin, held.num_records)

    def sites_of(self, slot: int) -> frozenset[int]:
        """Sites where kernels have something to add for the adapter."""
        return self._held[slot].sites

    def in_torch(self, slot: int) -> Set[int]:
        """Sites whose deltas kernels do not apply."""
        return self._held[slot].in_torch

    def max_ranks(self, slot: int) -> int:
        """Ranks of the adapter's widest stacked A, of those that kernels apply."""
        return self._held[slot].max_ranks

    def trains_norms(self, slot: int) -> bool:
        """Whether the adapter brings a norm's weight."""
        return self._held[slot].trains_norms


@dataclass(frozen=True, slots=True)
class Held:
    """What the tables hold of one adapter."""

    begin: int
    num_records: int
    sites: frozenset[int]
    in_torch: Set[int]
    trains_norms: bool
    max_ranks: int


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
