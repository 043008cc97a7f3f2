"""The part of each site's plan that one tensor-parallel rank has. Shapes only.

Where a site's outputs are divided, A is whole on every rank and B and all vectors are cut by
output. Where its inputs are divided, A is cut by input and B is whole, because each rank's product
is an addend of the result. Where both matrices are divided (`Site.divides_both`), A of the former
is cut by rank row as well, and B of the latter by output. The embedding's parts are whole
everywhere; those of the head are on rank 0, which samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loraplex_services.worker.adapters.pack.site_plan import Part, Role, SitePlan
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.sharding import (
    Shard,
    Span,
    local_range,
    num_features,
    padded_share,
    share_of,
    within,
)
from loraplex_services.worker.types.sites import HEAD, LM_HEAD, Site, Slice

RowIds = dict[str, tuple[int, ...]]
"""The rows of its site's weight that the adapter replaces, by module."""
ZEROS = -1
"""Stands in `Part.rows` for a row that fills up a rank's share."""


def cut_plans(plans: Sequence[SitePlan], layout: AdapterLayout, row_ids: RowIds) -> list[SitePlan]:
    """The plans of the layout's rank, without those of sites that it has nothing of; `plans` are
    of the whole adapter."""
    if layout.shard.size == 1:
        return list(plans)
    cut = (_cut_plan(plan, layout, row_ids) for plan in plans)
    return [plan for plan in cut if plan is not None]


def _cut_plan(plan: SitePlan, layout: AdapterLayout, row_ids: RowIds) -> SitePlan | None:
    site, shard = layout.sites.sites[plan.site_id], layout.shard
    if site.kind in (LM_HEAD, HEAD):
        return plan if shard.rank == 0 else None
    if site.cut.outputs:
        spans = shard.spans(site.cut.outputs)
        parts = tuple(_by_outputs(plan.parts, spans, row_ids))
        if site.divides_both:
            parts = tuple(_by_rank_rows(parts, shard))
        slices = tuple(_local_slice(part, spans) for part in plan.slices)
        return replace(plan, slices=slices, parts=parts)
    if site.cut.inputs:
        columns = shard.spans(site.cut.inputs)
        parts = tuple(_by_inputs(plan.parts, columns, shard))
        if site.divides_both:
            parts = tuple(_by_share_of_outputs(parts, shard))
        return replace(plan, parts=parts)
    return plan


def _local_slice(part: Slice, spans: Sequence[Span]) -> Slice:
    begin, length = local_range(spans, part.out_begin, part.out_begin + part.out_len)
    return part._replace(out_begin=begin, out_len=length)


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


def _by_rank_rows(parts: Sequence[Part], shard: Shard) -> Iterator[Part]:
    """A has as many rows on every rank, so that equal vectors are gathered."""
    begin = 0
    for part in parts:
        if part.role is Role.A:
            share = padded_share(part.matrix.num_rows, shard.size)
            rows = range(*share_of(part.matrix.num_rows, shard.rank, shard.size))
            padded = (*rows, *[ZEROS] * (share - len(rows)))
            matrix = replace(part.matrix, num_rows=share)
            yield replace(part, row_begin=begin, matrix=matrix, rows=padded)
            begin += share
        else:
            yield part


def _by_share_of_outputs(parts: Sequence[Part], shard: Shard) -> Iterator[Part]:
    for part in parts:
        if part.role is not Role.B:
            yield part
            continue
        begin, end = share_of(part.matrix.num_columns, shard.rank, shard.size)
        if begin < end:
            matrix = replace(part.matrix, num_columns=end - begin)
            columns = ((begin, end),)
            yield replace(part, col_begin=part.col_begin + begin, matrix=matrix, columns=columns)


def local_rows(ids: Sequence[int], part: Part, site: Site, shard: Shard) -> list[int]:
    """The ids of a part's replaced rows as the rank counts the site's outputs."""
    if part.rows is None:
        return list(ids)
    spans = shard.spans(site.cut.outputs)
    return [local_range(spans, ids[i], ids[i] + 1)[0] for i in part.rows]
