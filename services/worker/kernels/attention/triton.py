"""Launches of paged attention: append keys and values, attend in tiles, join splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.kernels.attention import triton_kernels as kernels
from services.worker.kernels.launch import must_widen, power_of_two

MIN_QUERIES = 16
"""Rows of the smallest tensor-core product."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one layer and its arithmetic."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None

    @property
    def num_shared(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_shared(self) -> int:
        """The same as a power of two."""
        return power_of_two(self.num_shared)

    @property
    def block_dim(self) -> int:
        """Head dimension as a power of two that products accept."""
        return max(16, power_of_two(self.head_dim))


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Sizes of one launch."""

    block_rows: int
    """Token rows of a tile; a power of two."""
    block_keys: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Float32 workspace of decode splits: values and (maximum, sum) of each row, head and split."""

    values: Tensor
    stats: Tensor


def decode_tiling(shape: HeadShape, num_splits: int, itemsize: int) -> AttentionTiling:
    """One row of each sequence, as many rows of the product as heads share."""
    rows = max(1, MIN_QUERIES // shape.block_shared)
    if itemsize == 4:
        return AttentionTiling(rows, 16, num_splits, num_warps=8)
    return AttentionTiling(rows, 64, num_splits)


def context_tiling(shape: HeadShape, itemsize: int) -> AttentionTiling:
    """64 queries of a product, fewer in float32, which has no tensor cores; one split."""
    if itemsize == 4:
        return AttentionTiling(max(1, 32 // shape.block_shared), 16, 1, num_warps=8)
    return AttentionTiling(max(1, 64 // shape.block_shared), 64, 1)


def context_tiles(spans: Sequence[tuple[int, int, int]], block_rows: int) -> list[list[int]]:
    """Rows of `tiles` for contexts given as (first token row, end row, first position)."""
    return [
        [sequence, row, min(row + block_rows, end), start + row - begin]
        for sequence, (begin, end, start) in enumerate(spans)
        for row in range(begin, end, block_rows)
    ]


def make_partial_sums(
    max_rows: int, shape: HeadShape, num_splits: int, device: torch.device
) -> PartialSums:
    """Workspace for `max_rows` generations."""
    lines = max_rows * shape.num_heads * num_splits
    return PartialSums(
        torch.empty(lines, shape.block_dim, dtype=torch.float32, device=device),
        torch.empty(lines, 2, dtype=torch.float32, device=device),
    )


def attend(
    out: Tensor,
    q: Tensor,
    planes: tuple[Tensor, Tensor],
    tiles: Tensor,
    tables: Tensor,
    shape: HeadShape,
    tiling: AttentionTiling,
    partial: PartialSums,
    rows: tuple[int, int],
) -> None:
    """Semantics: out[t, h] = softmax(softcap(scale * q[t, h] K^T)) V over the keys that t sees.

    Args:
        out, q: `[tokens, num_heads * head_dim]`, rows contiguous. Of `out`, the tiles' rows are
            mutated.
        planes: K and V of the layer in every block, each `[num_blocks, Hkv, T, D]`.
        tiles: int32 `[n, 4]`: sequence, first token row, end row, position of the first row.
        tables: int32 `[sequences, blocks]`; ids that no query sees are not read.
        partial: used with several splits only, by rows counted from `rows[0]`.
        rows: token rows [begin, end) that the tiles cover.
    """
    k_plane, v_plane = planes
    num_tokens = k_plane.shape[2]
    assert k_plane.stride() == v_plane.stride(), (k_plane.stride(), v_plane.stride())
    assert q.stride(1) == out.stride(1) == tables.stride(1) == 1, (q.stride(), tables.stride())
    strides = k_plane.stride(0), q.stride(0), out.stride(0), tables.stride(0)
    arithmetic = shape.scale, shape.softcap or 0.0, shape.window or 0
    kernels.attend[(len(tiles), shape.num_kv_heads, tiling.num_splits)](
        q,
        k_plane,
        v_plane,
        out,
        partial.values,
        partial.stats,
        tiles,
        tables,
        *strides,
        rows[0],
        shape.num_heads,
        *arithmetic,
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=shape.block_dim,
        NUM_SHARED=shape.num_shared,
        BLOCK_SHARED=shape.block_shared,
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_KEYS=tiling.block_keys,
        TOKENS=num_tokens,
        NUM_SPLITS=tiling.num_splits,
        HAS_SOFTCAP=shape.softcap is not None,
        HAS_WINDOW=shape.window is not None,
        WIDEN=must_widen(q.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if tiling.num_splits > 1:
        _combine(out, shape, tiling.num_splits, partial, rows)


def _combine(
    out: Tensor, shape: HeadShape, num_splits: int, partial: PartialSums, rows: tuple[int, int]
) -> None:
    kernels.combine[(rows[1] - rows[0], shape.num_heads)](
        partial.values,
        partial.stats,
        out,
        shape.num_heads,
        rows[0],
        out.stride(0),
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=shape.block_dim,
        NUM_SPLITS=num_splits,
        num_warps=1,
    )


def append(k: Tensor, v: Tensor, planes: tuple[Tensor, Tensor], places: Tensor) -> None:
    """Write keys and values `[tokens, Hkv * D]` to the cache.

    Args:
        planes: `[num_blocks, Hkv, T, D]` each. Mutated.
        places: int64 `[tokens]`: block * T + slot, or -1 for rows that have none.
    """
    _, num_heads, num_tokens, head_dim = planes[0].shape
    kernels.append[(len(k), num_heads)](
        k,
        v,
        *planes,
        places,
        k.stride(0),
        v.stride(0),
        planes[0].stride(0),
        TOKENS=num_tokens,
        HEAD_DIM=head_dim,
        BLOCK_DIM=power_of_two(head_dim),
        num_warps=1,
    )
