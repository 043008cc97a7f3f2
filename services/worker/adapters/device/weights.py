"""AdapterWeights: copies images into arena blocks and keeps the tables that kernels read.

It decides nothing: which adapter gets which slot and blocks is `AdapterCache`'s business. Tables
are sparse, keyed by (slot, site); tiles are views of the arena, never copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.adapter_format.rope_scaling import parse
from services.worker.adapters.device.base_values import TORCH_DTYPES
from services.worker.adapters.device.host_tier import HostTier
from services.worker.adapters.device.landing import Landing
from services.worker.adapters.pack.image import Image, ImageIndex, PackedRole, PackedSite
from services.worker.adapters.pack.site_plan import Role
from services.worker.arena_buffer import ArenaBuffer
from services.worker.layers.ropes import Ropes
from services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from services.worker.transfers import to_device
from services.worker.types.own_rope import BaseRopes, own_ropes

STORED_DTYPES = TORCH_DTYPES | {"I8": torch.int8}
"""Of tiles, by safetensors name."""


class AdapterWeights:
    """The adapters of one base on one device."""

    def __init__(
        self,
        arena: ArenaBuffer,
        max_resident: int,
        ropes: Ropes,
        base_ropes: BaseRopes,
        host: HostTier | None = None,
    ) -> None:
        """
        Args:
            ropes: of the model, where adapters' own, made from `base_ropes`, have rows.
            host: what copies go through; None = from the page cache straight into the arena.
        """
        self.table: dict[tuple[int, int], SiteDelta] = {}
        self._arena = arena
        self._max_resident = max_resident
        self._ropes = ropes
        self._base_ropes = base_ropes
        ropes.reserve(max_resident)
        self._sites_of_slot: dict[int, tuple[int, ...]] = {}
        self._host = host

    @property
    def stall_s(self) -> float:
        """Seconds for which steps have waited for copies under way."""
        return 0.0 if self._host is None else self._host.stalls.total_s

    def copy(
        self, image: Image, blocks: Sequence[int], step_s: float = 0.0
    ) -> tuple[Landing | None, float]:
        """Fill `blocks`, which no step in flight reads. From any one thread, beside the step.

        Raises and returns as `HostTier.copy` does.
        """
        assert len(blocks) == image.index.num_blocks, (len(blocks), image.index.num_blocks)
        if self._host is not None:
            return self._host.copy(image, blocks, step_s)
        size, left = self._arena.block_bytes, image.index.num_bytes
        lengths = [min(size, left - i * size) for i in range(len(blocks))]
        whole = self._arena.data.view(-1).numpy().data
        starts = [block * size for block in blocks]
        image.read_into([whole[s : s + n] for s, n in zip(starts, lengths, strict=True)])
        return None, 0.0

    def enter(self, slot: int, index: ImageIndex, blocks: Sequence[int]) -> None:
        """Enter what was copied into `blocks` under `slot`."""
        assert 0 <= slot < self._max_resident, (slot, self._max_resident)
        assert slot not in self._sites_of_slot, f"slot {slot} is in use"
        begins = [block * self._arena.block_bytes for block in blocks]
        flats = {name: self._arena.flat(dtype) for name, dtype in STORED_DTYPES.items()}
        scales = _scales(index.sites, self._arena.data.device)
        for site, own_scales in zip(index.sites, scales, strict=True):
            delta = _site_delta(site, own_scales, begins, flats)
            self.table[slot, site.site_id] = delta
        self._sites_of_slot[slot] = tuple(site.site_id for site in index.sites)
        if index.facts.rope_scaling:
            self._ropes.enter(slot, own_ropes(self._base_ropes, parse(index.facts.rope_scaling)))

    def unload(self, slot: int) -> None:
        """Take `slot` out of the tables; its blocks may be reused at once."""
        for site_id in self._sites_of_slot.pop(slot):
            del self.table[slot, site_id]
        self._ropes.remove(slot)


def _scales(sites: Sequence[PackedSite], device: torch.device) -> Sequence[Tensor]:
    """float32 `[rank]` of each site, views of one vector: scales, times factors where A and B are
    integers."""
    by_site = [[s for _, n, _, _, scale in site.slices for s in [scale] * n] for site in sites]
    flat = torch.tensor([s for part in by_site for s in part], dtype=torch.float32)
    factors = [
        factor
        for site, scales in zip(sites, by_site, strict=True)
        for factor in site.factors or [1.0] * len(scales)
    ]
    flat = to_device(flat.mul_(torch.tensor(factors)), device)
    return flat.split([len(part) for part in by_site]) if by_site else ()


def _site_delta(
    site: PackedSite, scales: Tensor, begins: Sequence[int], flats: dict[str, Tensor]
) -> SiteDelta:
    """Views of the arena, where the site's tiles have been copied to.

    Args:
        begins: byte offset of each of the adapter's blocks.
        flats: the arena's bytes in each type.
    """
    tiles = {Role(role.role): _tiles(role, begins, flats[role.dtype]) for role in site.roles}
    return SiteDelta(
        slices=tuple(Slice(*fields) for fields in site.slices),
        a=tiles.get(Role.A, ()),
        b=tiles.get(Role.B, ()),
        scales=scales,
        lora_biases=tiles.get(Role.LORA_BIAS, ()),
        gains=tiles.get(Role.GAIN, ()),
        biases=tiles.get(Role.BIAS, ()),
        norm=tiles.get(Role.NORM, ()),
        rows=tiles.get(Role.ROWS, ()),
        row_ids=to_device(torch.tensor(site.row_ids), scales.device) if site.row_ids else None,
        num_rows=site.num_rows,
    )


def _tiles(role: PackedRole, begins: Sequence[int], flat: Tensor) -> tuple[Tile, ...]:
    item_bytes, first = flat.itemsize, flat.storage_offset()
    tiles = []
    for row_begin, row_end, col_begin, col_end, block, offset in role.tiles:
        width = col_end - col_begin
        begin = first + (begins[block] + offset) // item_bytes
        view = flat.as_strided((row_end - row_begin, width), (width, 1), begin)
        tiles.append(Tile(row_begin, row_end, col_begin, col_end, view))
    return tuple(tiles)
