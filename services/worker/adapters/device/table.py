"""The tensors that each resident adapter adds at each site, as views of the arena that are made on
demand.

Kernels on a GPU read records instead of views, so most adapters there need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.adapters.device.base_values import TORCH_DTYPES
from loraplex_services.worker.adapters.pack.image import ImageIndex, PackedRole, PackedSite
from loraplex_services.worker.adapters.pack.image_records import rank_scales, records_in
from loraplex_services.worker.adapters.pack.site_plan import Role
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.ops.lora.device_records import AdapterRecords
from loraplex_services.worker.ops.lora.tables import SiteDelta, Tile
from loraplex_services.worker.transfers import to_device

STORED_DTYPES = TORCH_DTYPES | {"I8": torch.int8}
"""dtypes of tiles, by safetensors name."""

_A, _B = Role.A.value, Role.B.value
_LORA_BIAS, _GAIN, _BIAS = Role.LORA_BIAS.value, Role.GAIN.value, Role.BIAS.value
_NORM, _ROWS = Role.NORM.value, Role.ROWS.value


class AdapterTable(Mapping[tuple[int, int], SiteDelta]):
    """(slot, site id) -> what the adapter adds there; sparse."""

    def __init__(self, arena: ArenaBuffer) -> None:
        self._arena = arena
        self._adapters: dict[int, EnteredAdapter] = {}

    def enter(self, slot: int, index: ImageIndex, first_pages: Sequence[int]) -> None:
        """Enter what has been copied to `first_pages` under `slot`, which is not in use."""
        assert slot not in self._adapters, f"slot {slot} is in use"
        starts = [first_page * self._arena.page_bytes for first_page in first_pages]
        self._adapters[slot] = EnteredAdapter(self._arena, index, starts)

    def remove(self, slot: int) -> None:
        """Forget a slot; its pages may be reused at once."""
        del self._adapters[slot]

    def adapter(self, slot: int) -> EnteredAdapter:
        """The adapter of a slot that is in use."""
        return self._adapters[slot]

    def __getitem__(self, key: tuple[int, int]) -> SiteDelta:
        delta = self._find(*key)
        if delta is None:
            raise KeyError(key)
        return delta

    def get(self, key: tuple[int, int], default: Any = None) -> Any:
        """`Mapping.get`, without raising if an adapter has nothing at a site."""
        delta = self._find(*key)
        return default if delta is None else delta

    def _find(self, slot: int, site_id: int) -> SiteDelta | None:
        adapter = self._adapters.get(slot)
        return None if adapter is None else adapter.delta(site_id)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for slot, adapter in self._adapters.items():
            yield from ((slot, site_id) for site_id in adapter.sites)

    def __len__(self) -> int:
        return sum(len(adapter.sites) for adapter in self._adapters.values())


@dataclass(slots=True)
class EnteredAdapter:
    """One adapter and its extents in the arena."""

    arena: ArenaBuffer
    index: ImageIndex
    starts: Sequence[int]
    """Byte offset of each of its extents."""
    sites: dict[int, PackedSite] = field(init=False)
    """Packed sites by site id."""
    _deltas: dict[int, SiteDelta] = field(init=False, default_factory=dict)
    _scales: dict[int, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.sites = {site.site_id: site for site in self.index.sites}

    @property
    def in_torch(self) -> frozenset[int]:
        """Sites whose deltas are not described by a record."""
        return frozenset(self.index.records.sites_without)

    @property
    def trains_norms(self) -> bool:
        """Whether the adapter replaces a norm's weight."""
        norm = Role.NORM.value
        return any(
            role.role == norm for site_id in self.in_torch for role in self.sites[site_id].roles
        )

    def records(self) -> AdapterRecords:
        """The records that kernels on a GPU read, counted from the image's extents."""
        return records_in(self.index)

    def delta(self, site_id: int) -> SiteDelta | None:
        """The update of the adapter at a site; None if it has none."""
        if site_id not in self._deltas:
            if site_id not in self.sites:
                return None
            self._deltas[site_id] = self._make(self.sites[site_id])
        return self._deltas[site_id]

    def _make(self, site: PackedSite) -> SiteDelta:
        tiles = {role.role: self._tiles(role) for role in site.roles}
        device = self.arena.data.device
        return SiteDelta(
            slices=tuple(site.slices),
            a=tiles.get(_A, ()),
            b=tiles.get(_B, ()),
            scales=self._scales_of(site.site_id),
            lora_biases=tiles.get(_LORA_BIAS, ()),
            gains=tiles.get(_GAIN, ()),
            biases=tiles.get(_BIAS, ()),
            norm=tiles.get(_NORM, ()),
            rows=tiles.get(_ROWS, ()),
            row_ids=to_device(torch.tensor(site.row_ids), device) if site.row_ids else None,
            num_rows=site.num_rows,
        )

    def _scales_of(self, site_id: int) -> Tensor:
        """float32 `[rank]`, a view of one vector for all sites, which is copied to the device at
        the first use."""
        if self._scales is None:
            sites = self.sites.values()
            flat = torch.from_numpy(np.array(rank_scales(sites), np.float32))
            lengths = [sum(part.rank_len for part in site.slices) for site in sites]
            parts = to_device(flat, self.arena.data.device).split(lengths)
            self._scales = dict(zip(self.sites, parts, strict=True))
        return self._scales[site_id]

    def _tiles(self, role: PackedRole) -> tuple[Tile, ...]:
        flat = self.arena.flat(STORED_DTYPES[role.dtype])
        item_bytes, first = flat.itemsize, flat.storage_offset()
        tiles = []
        for row_begin, row_end, col_begin, col_end, extent, offset in role.tiles:
            width = col_end - col_begin
            begin = first + (self.starts[extent] + offset) // item_bytes
            view = flat.as_strided((row_end - row_begin, width), (width, 1), begin)
            tiles.append(Tile(row_begin, row_end, col_begin, col_end, view))
        return tuple(tiles)
