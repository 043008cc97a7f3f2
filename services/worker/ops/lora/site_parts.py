"""The parts of each site that GPU kernels update: one for each of its modules. Pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

from loraplex_services.worker.ops.lora.device_records import MAX_PARTS, OutputRange
from loraplex_services.worker.types.sites import LINEAR, LM_HEAD, SiteTable

SERVED_KINDS = (LINEAR, LM_HEAD)
"""Kinds of sites that kernels serve."""


def module_edges(sites: SiteTable) -> list[list[int]]:
    """Where the outputs of each site's modules begin and end, ascending, by site id."""
    edges: dict[int, set[int]] = {site.id: {0, site.out_features} for site in sites.sites}
    for site_range in sites.modules.values():
        edges[site_range.site_id] |= {
            site_range.out_begin,
            site_range.out_begin + site_range.out_features,
        }
    return [sorted(edges[site.id]) for site in sites.sites]


def site_parts(sites: SiteTable) -> list[tuple[OutputRange, ...]]:
    """The parts of each site, by site id, ascending and without gaps. A site of more than
    `MAX_PARTS` modules is one part; sites that kernels do not serve have none."""
    parts: list[tuple[OutputRange, ...]] = []
    for site, edges in zip(sites.sites, module_edges(sites), strict=True):
        if len(edges) - 1 > MAX_PARTS:
            edges = [0, site.out_features]
        if site.kind in SERVED_KINDS:
            parts.append(tuple(OutputRange(site.id, a, b - a) for a, b in pairwise(edges)))
        else:
            parts.append(())
    return parts
