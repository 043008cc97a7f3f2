"""Enters adapters into the device tables from views of the arena, without an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from loraplex_services.worker.ops.lora.device_records import (
    RecordBuilder,
    Rectangle,
    SiteMatrices,
)
from loraplex_services.worker.ops.lora.device_tables import DeviceTables
from loraplex_services.worker.ops.lora.tables import SiteDelta, Tile


def enter_deltas(
    tables: DeviceTables,
    slot: int,
    deltas: Mapping[int, SiteDelta],
    in_torch: Set[int] = frozenset(),
) -> None:
    """Make and write an adapter's records.

    Args:
        deltas: by site id; tiles are views of the tables' arena.
        in_torch: sites whose deltas kernels do not apply (embeddings, norms, replaced rows).
    """
    builder = RecordBuilder(tables.parts)
    for site_id, delta in deltas.items():
        if site_id not in in_torch:
            builder.add_site(site_id, matrices_of(delta, tables.arena.data_ptr()))
    trains_norms = any(delta.norm for delta in deltas.values())
    tables.enter_records(slot, builder.build(), (0,), in_torch, trains_norms)


def matrices_of(delta: SiteDelta, arena_address: int) -> SiteMatrices:
    """What records say of a delta, with the arena as its only block."""

    def rectangles(tiles: Sequence[Tile]) -> list[Rectangle]:
        return [
            Rectangle(
                tile.row_begin,
                tile.row_end,
                tile.col_begin,
                tile.col_end,
                0,
                tile.data.data_ptr() - arena_address,
                tile.data.itemsize,
            )
            for tile in tiles
        ]

    return SiteMatrices(
        delta.slices,
        rectangles(delta.a),
        rectangles(delta.b),
        rectangles(delta.gains),
        rectangles(delta.lora_biases),
        rectangles(delta.biases),
        delta.scales.tolist() if delta.is_int8 else (),
    )
