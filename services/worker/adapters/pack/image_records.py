"""Makes the records of GPU kernels in an adapter's image, when it is packed. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec
import numpy as np

from loraplex_services.worker.adapters.pack.image import ImageIndex, PackedRecords, PackedSite
from loraplex_services.worker.adapters.pack.site_plan import Role
from loraplex_services.worker.adapters.pack.values import itemsize
from loraplex_services.worker.ops.lora.device_records import (
    INDEX_WORDS,
    RECORD_WORDS,
    RELOCATION_WORDS,
    AdapterRecords,
    RecordBuilder,
    Rectangle,
    SiteMatrices,
)
from loraplex_services.worker.ops.lora.site_parts import SERVED_KINDS, site_parts
from loraplex_services.worker.types.sites import SiteTable

INT8 = "I8"


def with_records(index: ImageIndex, table: SiteTable, in_torch: Set[int]) -> ImageIndex:
    """A copy of the index with records of all sites that kernels serve, none of those
    `in_torch`."""
    builder = RecordBuilder([part for parts in site_parts(table) for part in parts])
    others = []
    for site in index.sites:
        kind = table.sites[site.site_id].kind
        served = kind in SERVED_KINDS and site.site_id not in in_torch
        if served and not site.row_ids and not site.num_rows:
            builder.add_site(site.site_id, _matrices_of(site))
        else:
            others.append(site.site_id)
    made = builder.build()
    index_and_data = made.index.tobytes(), made.data.tobytes()
    records = PackedRecords(*index_and_data, made.relocations.tobytes(), sorted(made.sites), others)
    return msgspec.structs.replace(index, records=records)


def records_in(index: ImageIndex) -> AdapterRecords:
    """The records of an image, which count from its extents."""
    packed = index.records
    return AdapterRecords(
        frozenset(packed.sites),
        np.frombuffer(packed.index, np.int32).reshape(-1, INDEX_WORDS),
        np.frombuffer(packed.data, np.int64).reshape(-1, RECORD_WORDS),
        np.frombuffer(packed.relocations, np.int32).reshape(-1, RELOCATION_WORDS),
    )


def rank_scales(sites: Iterable[PackedSite]) -> list[float]:
    """The scale of each rank row of each site, times its factor where A and B are integers."""
    scales = []
    for site in sites:
        own = [part.scale for part in site.slices for _ in range(part.rank_len)]
        if site.factors:
            own = [scale * factor for scale, factor in zip(own, site.factors, strict=True)]
        scales += own
    return scales


def _matrices_of(site: PackedSite) -> SiteMatrices:
    roles = {Role(role.role): role for role in site.roles}

    def rectangles(role: Role) -> list[Rectangle]:
        if role not in roles:
            return []
        item_bytes = itemsize(roles[role].dtype)
        return [Rectangle(*tile, item_bytes) for tile in roles[role].tiles]

    return SiteMatrices(
        site.slices,
        rectangles(Role.A),
        rectangles(Role.B),
        rectangles(Role.GAIN),
        rectangles(Role.LORA_BIAS),
        rectangles(Role.BIAS),
        rank_scales([site]) if Role.A in roles and roles[Role.A].dtype == INT8 else (),
    )
