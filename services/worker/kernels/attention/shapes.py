"""Sizes of attention launches: the heads of a layer and the tiles of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.kernels.launch import power_of_two

MIN_QUERIES = 16
"""Rows of the smallest tensor-core product."""
JOINED_ELEMENTS = 4096
"""Partial sums that one program loads at a time: 32 of each thread."""


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
        """`num_shared` rounded up to a power of two."""
        return power_of_two(self.num_shared)

    @property
    def block_dim(self) -> int:
        """Head dimension rounded up to a power of two that tensor-core products accept."""
        return max(16, power_of_two(self.head_dim))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch; all are powers of two except the number of stages."""

    block_queries: int
    """Rows of the product: token rows times the query heads that share a KV head."""
    block_keys: int
    num_warps: int
    num_stages: int
    programs_per_processor: int = 1
    """Of a launch with a fixed grid: as many as fit a multiprocessor's memory."""


def context_tiling(shape: HeadShape, itemsize: int) -> Tiling:
    """128 queries, so that each key that is read serves many products; fewer where the
    accumulator of wide heads would not fit, and in float32, which has no tensor cores."""
    if itemsize == 4:
        return Tiling(max(32, shape.block_shared), 16, num_warps=8, num_stages=2)
    if shape.block_dim > 128:
        return Tiling(max(64, shape.block_shared), 32, num_warps=8, num_stages=2)
    return Tiling(max(128, shape.block_shared), 64, num_warps=8, num_stages=2)


def generation_tiling(shape: HeadShape, itemsize: int) -> Tiling:
    """The query heads of one KV head, padded to the smallest product. Two steps of keys and values
    are on their way while a third is computed."""
    queries = max(MIN_QUERIES, shape.block_shared)
    if itemsize == 4:
        return Tiling(queries, 16, num_warps=8, num_stages=2, programs_per_processor=2)
    if shape.block_dim > 128:
        return Tiling(queries, 32, num_warps=4, num_stages=3, programs_per_processor=2)
    return Tiling(queries, 64, num_warps=4, num_stages=3, programs_per_processor=3)


def joined_splits(shape: HeadShape) -> int:
    """Items of a row that are joined at a time."""
    return max(1, JOINED_ELEMENTS // (shape.block_shared * shape.block_dim))
