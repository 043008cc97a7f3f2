"""Launches of paged attention: append keys and values, attend with contexts and generations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from loraplex_services.worker.ops.attention import triton_kernels as kernels
from loraplex_services.worker.ops.attention.kv_codes import NO_SCALES, Scales, code_bits
from loraplex_services.worker.ops.attention.shapes import (
    HeadShape,
    Tiling,
    context_tiling,
    generation_tiling,
    joined_splits,
)
from loraplex_services.worker.ops.attention.work_items import SPARE_ITEMS, PartialSums
from loraplex_services.worker.ops.early import early_start
from loraplex_services.worker.ops.launch import must_widen, num_programs, power_of_two, shared_bytes

TILE_WORDS = kernels.TILE_WORDS.value


def tiling_of_contexts(shape: HeadShape, q: Tensor, scales: Scales) -> Tiling:
    """The tiling of the contexts of a step with these queries."""
    in_codes = scales is not NO_SCALES
    return context_tiling(shape, q.itemsize, shared_bytes(q.device), len(q), in_codes=in_codes)


def context_tiles(
    spans: Sequence[tuple[int, int, int]], block_rows: int, table_rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Rows of `tiles` for contexts given as (first token row, end row, first position).

    Tiles that see the most keys come first, so that no long one is left at the end of a launch.

    Args:
        table_rows: of each context in the block tables; None = in order.
    """
    tiles = [
        [
            sequence if table_rows is None else table_rows[sequence],
            row,
            min(row + block_rows, end),
            start + row - begin,
            start + end - begin,
        ]
        for sequence, (begin, end, start) in enumerate(spans)
        for row in range(begin, end, block_rows)
    ]
    return sorted(tiles, key=lambda tile: -tile[3])


def attend_contexts(
    out: Tensor,
    q: Tensor,
    planes: tuple[Tensor, Tensor],
    tiles: Tensor,
    tables: Tensor,
    shape: HeadShape,
    tiling: Tiling,
    sinks: Tensor | None = None,
    *,
    scales: Scales = NO_SCALES,
    is_full: bool = False,
) -> None:
    """Semantics: out[t, h] = softmax(softcap(scale * q[t, h] K^T)) V over the keys that t sees.

    Args:
        out, q: `[tokens, num_heads * head_dim]`, rows contiguous. Of `out`, the tiles' rows are
            mutated.
        planes: K and V of the layer in every block, each `[num_blocks, Hkv, T, D]`.
        tiles: int32 `[n, 5]`: sequence, first token row, end row, position of the first row, keys
            of the sequence; of `tiling.block_queries // shape.block_shared` rows each.
        tables: int32 `[sequences, blocks]`; the blocks of ids that no query sees are not read.
        tiling: see `tiling_of_contexts`.
        sinks: float32 `[num_heads]`: a score in addition to those of the keys, without a value.
        scales: of planes of codes, as `KvBuffer.scales` returns them.
        is_full: a row sees all keys of its sequence, whatever the window.
    """
    if is_full:
        shape = dataclasses.replace(shape, window=None)
    kernels.attend_contexts[(shape.num_kv_heads, len(tiles))](
        q,
        *code_bits(planes),
        *scales,
        out,
        q if sinks is None else sinks,
        tiles,
        tables,
        *_strides(out, q, planes, tables),
        shape.scale,
        shape.softcap or 0.0,
        shape.window or 0,
        **context_constants(shape, tiling, planes[0].shape[2], is_full=is_full),
        HAS_SINKS=sinks is not None,
        WIDEN=must_widen(q.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )


def attend_generations(
    out: Tensor,
    q: Tensor,
    planes: tuple[Tensor, Tensor],
    items: Tensor,
    tables: Tensor,
    shape: HeadShape,
    partial: PartialSums,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
    *,
    scales: Scales = NO_SCALES,
) -> None:
    """`attend_contexts` for sequences with one query each.

    Args:
        items: as `work_items.list_items` fills it for the layer's window.
        partial: large enough for the items and token rows of the step. Mutated.
    """
    tiling = tiling or generation_tiling(shape, q.itemsize, in_codes=scales is not NO_SCALES)
    grid = num_programs(q.device, tiling.programs_per_processor)
    assert grid <= SPARE_ITEMS, grid
    kernels.attend_generations[(grid,)](
        q,
        *code_bits(planes),
        *scales,
        out,
        q if sinks is None else sinks,
        items,
        partial.values,
        partial.stats,
        partial.num_finished,
        tables,
        *_strides(out, q, planes, tables),
        shape.num_kv_heads,
        shape.scale,
        shape.softcap or 0.0,
        **generation_constants(shape, tiling, planes[0].shape[2]),
        HAS_SINKS=sinks is not None,
        WIDEN=must_widen(q.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
        **early_start(q.device),
    )


def _strides(
    out: Tensor, q: Tensor, planes: tuple[Tensor, Tensor], tables: Tensor
) -> tuple[int, int, int, int]:
    k_plane, v_plane = planes
    assert k_plane.stride() == v_plane.stride(), (k_plane.stride(), v_plane.stride())
    assert q.stride(1) == out.stride(1) == tables.stride(1) == 1, (q.stride(), tables.stride())
    return k_plane.stride(0), q.stride(0), out.stride(0), tables.stride(0)


def context_constants(
    shape: HeadShape, tiling: Tiling, block_tokens: int, *, is_full: bool
) -> dict[str, Any]:
    """Compile-time arguments of `attend_contexts` besides WIDEN."""
    block_rows = tiling.block_queries // shape.block_shared
    return _constants(shape, tiling, block_tokens) | {
        "BLOCK_ROWS": block_rows,
        "HAS_WINDOW": shape.window is not None,
        "IS_FULL": is_full,
    }


def generation_constants(shape: HeadShape, tiling: Tiling, block_tokens: int) -> dict[str, Any]:
    """Compile-time arguments of `attend_generations` besides WIDEN."""
    return _constants(shape, tiling, block_tokens) | {
        "BLOCK_QUERIES": tiling.block_queries,
        "JOINED_SPLITS": joined_splits(shape),
    }


def _constants(shape: HeadShape, tiling: Tiling, block_tokens: int) -> dict[str, Any]:
    return {
        "HEAD_DIM": shape.head_dim,
        "BLOCK_DIM": shape.block_dim,
        "NUM_SHARED": shape.num_shared,
        "BLOCK_SHARED": shape.block_shared,
        "BLOCK_KEYS": tiling.block_keys,
        "TOKENS": block_tokens,
        "HAS_SOFTCAP": shape.softcap is not None,
    }


def append(
    k: Tensor,
    v: Tensor,
    planes: tuple[Tensor, Tensor],
    kv_slots: Tensor,
    scales: Scales = NO_SCALES,
) -> None:
    """Write keys and values `[tokens, Hkv * D]` to the cache.

    Args:
        planes: `[num_blocks, Hkv, T, D]` each. Mutated.
        kv_slots: int64 `[tokens]`: block * T + slot, or -1 for rows that have none.
        scales: of planes of codes. Mutated.
    """
    _, num_heads, num_tokens, head_dim = planes[0].shape
    kernels.append[(len(k), num_heads)](
        k,
        v,
        *code_bits(planes),
        *scales,
        kv_slots,
        k.stride(0),
        v.stride(0),
        planes[0].stride(0),
        TOKENS=num_tokens,
        HEAD_DIM=head_dim,
        BLOCK_DIM=power_of_two(head_dim),
        num_warps=1,
    )
