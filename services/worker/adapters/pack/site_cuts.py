"""What one tensor-parallel rank has of an adapter: its part of each site's plan. Shapes only.

Where a site's outputs are divided, A is whole on every rank and B and all vectors are cut by
output. Where its inputs are divided, A is cut by input and B is whole, because each rank's product
is an addend of the result. The embedding's parts are whole everywhere; those of the head are on
rank 0, which samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loraplex_services.worker.adapters.pack.site_plan import Part, Role, SitePlan
from loraplex_services.worker.ops.lora.slices import Slice
from loraplex_services.worker.types.sharding import (
    Shard,
    Span,
    local_range,
    num_features,
    within,
)
from loraplex_services.worker.types.sites import HEAD, LM_HEAD, Site, SiteTable

RowIds = dict[str, tuple[int, ...]]
"""By module: which rows of its site's weight the adapter replaces."""


def cut_plans(
    plans: Sequence[SitePlan], table: SiteTable, shard: Shard, row_ids: RowIds
) -> list[SitePlan]:
    """The plans of one rank, without those of sites that it has nothing of.

    Args:
        plans: of the whole adapter.
        table: of the whole base.
    """
    if shard.size == 1:
        return list(plans)
    cut = (_cut_plan(plan, table.sites[plan.site_id], shard, row_ids) for plan in plans)
    return [plan for plan in cut if plan is not None]


def _cut_plan(plan: SitePlan, site: Site, shard: Shard, row_ids: RowIds) -> SitePlan | None:
    if site.kind in (LM_HEAD, HEAD):
        return plan if shard.rank == 0 else None
    if site.cut.outputs:
        spans = shard.spans(site.cut.outputs)
        parts = tuple(_by_outputs(plan.parts, spans, row_ids))
        slices = tuple(_local_slice(part, spans) for part in plan.slices)
        return replace(plan, slices=slices, parts=parts)
    if site.cut.inputs:
        columns = shard.spans(site.cut.inputs)
        return replace(plan, parts=tuple(_by_inputs(plan.parts, columns, shard)))
    return plan


def _local_slice(part: Slice, spans: Sequence[Span]) -> Slice:
    begin, length = local_range(spans, part.out_begin, part.out_begin + part.out_len)
    return replace(part, out_begin=begin, out_len=length)


def _by_outputs(parts: Sequence[Part], spans: Sequence[Span], row_ids: RowIds) -> Iterator[Part]:
    num_rows = 0
    for part in parts:
        if part.role is Role.A:
            yield part
        elif part.role is Role.ROWS:
            ids = row_ids[part.module.name]
            kept = tuple(i for i, row in enumerate(ids) if within(spans, row, row + 1))
            if kept:
                matrix = replace(part.matrix, num_rows=len(kept))
                yield replace(part, row_begin=num_rows, matrix=matrix, rows=kept)
            num_rows += len(kept)
        else:
            begin, end = part.col_begin, part.col_begin + part.matrix.num_columns
            col_begin, num_columns = local_range(spans, begin, end)
            matrix = replace(part.matrix, num_columns=num_columns)
            columns = tuple(within(spans, begin, end))
            yield replace(part, col_begin=col_begin, matrix=matrix, columns=columns)


def _by_inputs(parts: Sequence[Part], columns: tuple[Span, ...], shard: Shard) -> Iterator[Part]:
    for part in parts:
        if part.role in (Role.A, Role.ROWS):
            matrix = replace(part.matrix, num_columns=num_features(columns))
            yield replace(part, matrix=matrix, columns=columns)
        elif part.role not in (Role.LORA_BIAS, Role.BIAS) or shard.rank == 0:
            yield part  # a bias is added once, a gain scales every addend


def local_rows(ids: Sequence[int], part: Part, site: Site, shard: Shard) -> list[int]:
    """The ids of a part's replaced rows as the rank counts the site's outputs."""
    if part.rows is None:
        return list(ids)
    spans = shard.spans(site.cut.outputs)
    return [local_range(spans, ids[i], ids[i] + 1)[0] for i in part.rows]
