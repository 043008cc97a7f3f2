"""Fills one image: writes an adapter's values, as one rank has them, to their tiles."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex_services.worker.adapters.pack.image import (
    ImageIndex,
    PackedAdapter,
    PackedRole,
    PackedSite,
)
from loraplex_services.worker.adapters.pack.image_records import with_records
from loraplex_services.worker.adapters.pack.site_cuts import (
    ZEROS,
    RowIds,
    cut_plans,
    local_rows,
)
from loraplex_services.worker.adapters.pack.site_plan import Part, Role, SitePlan
from loraplex_services.worker.adapters.pack.tiles import ImageTile, TileLayout
from loraplex_services.worker.adapters.pack.values import Values, itemsize
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.adapter_layout import AdapterLayout

PartKey = tuple[int, str, Role]
"""Site id, module and role: names a part in the plans of every rank."""


class Integers(NamedTuple):
    """A matrix as integers of rows with a factor each."""

    values: Values
    factors: NDArray[np.float32]


class ImageBuilder:
    """One layout's image. `put` takes whole values, part by part, in the order of the plans."""

    def __init__(
        self,
        plans: Sequence[SitePlan],
        layout: AdapterLayout,
        fingerprint: str,
        row_ids: RowIds,
    ) -> None:
        """
        Args:
            plans: of the whole adapter.
            fingerprint: that of `layout`, which takes time to compute.
        """
        self._layout = layout
        self._fingerprint = fingerprint
        self._row_ids = row_ids
        self._plans = cut_plans(plans, layout, row_ids)
        parts = {_key(plan, part): part for plan in self._plans for part in plan.parts}
        packing = TileLayout(layout.block_bytes).pack([part.matrix for part in parts.values()])
        self._num_pages, self._num_bytes = packing.num_pages, packing.num_bytes
        self._begins = layout.extent_begins(packing.num_pages)
        self._data = np.zeros(packing.num_bytes, np.uint8)
        self._parts = {
            key: (part, tiles)
            for (key, part), tiles in zip(parts.items(), packing.tiles, strict=True)
        }
        self._tiles: dict[int, dict[Role, tuple[str, list[ImageTile]]]] = {}
        self._factors: dict[int, NDArray[np.float32]] = {}
        self._index: ImageIndex | None = None

    def again(self) -> ImageBuilder:
        """After `build`: a builder for another adapter with the same index, which is the case if
        plans and types are the same, and no rows are replaced and no values are integers."""
        other = copy.copy(self)
        other._data = np.zeros(self._num_bytes, np.uint8)
        return other

    def wants(self, plan: SitePlan, part: Part) -> bool:
        """Whether the rank has anything of a part of the whole adapter."""
        return _key(plan, part) in self._parts

    def put(self, plan: SitePlan, part: Part, value: Values | Integers) -> None:
        """Write what the rank has of a whole value."""
        own, cut = self._parts[_key(plan, part)]
        if isinstance(value, Integers):
            num_ranks = sum(own_slice.rank_len for own_slice in plan.slices)
            ones = np.ones(num_ranks, np.float32)
            factors = self._factors.setdefault(plan.site_id, ones)
            factors[part.row_begin : part.row_begin + len(value.factors)] *= value.factors
            value = value.values
        value = _cut(value, own)
        self._write(value, cut)
        if self._index is not None:
            return
        roles = self._tiles.setdefault(plan.site_id, {})
        _, tiles = roles.setdefault(own.role, (value.dtype, []))
        tiles += [_shifted(tile, own) for tile in cut]

    def build(self, facts: AdapterFacts) -> PackedAdapter:
        """The image; every part was put. The builder keeps its index and none of its bytes."""
        if self._index is None:
            self._index = self._indexed(facts)
        data, self._data = self._data, np.zeros(0, np.uint8)
        return PackedAdapter(self._index, data.data)

    def _indexed(self, facts: AdapterFacts) -> ImageIndex:
        sites = [self._site(plan) for plan in self._plans]
        index = ImageIndex(self._fingerprint, self._num_pages, self._num_bytes, sites, facts)
        layout = self._layout
        in_torch = {site.id for site in layout.sites.sites if site.divides_both}
        return with_records(index, layout.sites.on_rank(layout.shard), in_torch)

    def _site(self, plan: SitePlan) -> PackedSite:
        roles = [
            PackedRole(role.value, dtype, list(_merged(tiles, itemsize(dtype))))
            for role, (dtype, tiles) in self._tiles.get(plan.site_id, {}).items()
        ]
        factors = self._factors.get(plan.site_id)
        return PackedSite(
            plan.site_id,
            list(plan.slices),
            roles,
            self._rows_of(plan),
            plan.num_rows,
            [] if factors is None else factors.tolist(),
        )

    def _rows_of(self, plan: SitePlan) -> list[int]:
        """Ids of the rows that the adapter replaces, as the rank counts them."""
        site, shard = self._layout.sites.sites[plan.site_id], self._layout.shard
        row_ids: list[int] = []
        for part in plan.parts:
            if part.role is Role.ROWS:
                row_ids += local_rows(self._row_ids[part.module.name], part, site, shard)
        return row_ids

    def _write(self, value: Values, tiles: Sequence[ImageTile]) -> None:
        item_type: Any = value.data.dtype
        for tile in tiles:
            begin = self._begins[tile.extent] + tile.offset_bytes
            shape = tile.row_end - tile.row_begin, tile.col_end - tile.col_begin
            end = begin + shape[0] * shape[1] * item_type.itemsize
            rows = slice(tile.row_begin, tile.row_end)
            target = self._data[begin:end].view(item_type).reshape(shape)
            target[:] = value.data[rows, tile.col_begin : tile.col_end]


def _key(plan: SitePlan, part: Part) -> PartKey:
    return plan.site_id, part.module.name, part.role


def _cut(value: Values, part: Part) -> Values:
    data = value.data
    if part.rows is not None:
        data = data[list(part.rows)]
        data[np.array(part.rows) == ZEROS] = 0
    if part.columns is not None:
        data = np.concatenate([data[:, begin:end] for begin, end in part.columns], axis=1)
    return Values(data, value.dtype)


def _shifted(tile: ImageTile, part: Part) -> ImageTile:
    """A tile in the coordinates of its site."""
    return tile._replace(
        row_begin=part.row_begin + tile.row_begin,
        row_end=part.row_begin + tile.row_end,
        col_begin=part.col_begin + tile.col_begin,
        col_end=part.col_begin + tile.col_end,
    )


def _merged(tiles: Sequence[ImageTile], item_bytes: int) -> Iterator[ImageTile]:
    """Join tiles of an extent whose rows follow each other in the matrix and in memory."""
    last = tiles[0]
    for _, tile in pairwise(tiles):
        num_items = (last.row_end - last.row_begin) * (last.col_end - last.col_begin)
        end = last.offset_bytes + num_items * item_bytes
        follows = last._replace(row_begin=last.row_end, row_end=tile.row_end, offset_bytes=end)
        if tile == follows:
            last = last._replace(row_end=tile.row_end)
        else:
            yield last
            last = tile
    yield last
