"""The heads of a layer, and the tiles of its Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loraplex_services.worker.ops.launch import power_of_two
from loraplex_services.worker.types.model_config import ModelConfig

MIN_QUERIES = 16
"""Rows of the smallest tensor-core product."""
MIN_KEYS = 16
"""Keys of one, which are whole blocks."""
LARGE_SHARED_BYTES = 160 << 10
"""The least that data-centre GPUs since Ampere have; the others have 99 KiB."""
TWICE_LARGE_BYTES = 200 << 10
"""The least that those since Hopper have, which is enough for two programs of 96 KiB."""
LARGE_STEP_ROWS = 1 << 15
"""Token rows times query heads: 256 tiles of 128 queries."""
WIDE_DIM = 256
"""Wider heads, such as those of Gemma 4's full layers, leave memory for few keys at a time."""
JOINED_ELEMENTS = 4096
"""Partial sums that one program loads at a time: 64 of each thread."""
MAX_JOINED_SPLITS = 16
"""Items that are joined at a time, at most. The loop over them is unrolled: 16 take about a second
to compile, 32 take four, and 64 take 24 seconds."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one layer and its arithmetic."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    is_chunked: bool = False
    """Whether the window does not slide: a query sees keys from the last multiple of it on."""

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> HeadShape:
        """The heads of one layer of a model."""
        heads = config.kv_heads[layer]
        return cls(
            config.num_heads,
            heads.count,
            heads.dim,
            config.attention_scale,
            config.attention_softcap,
            config.windows[layer],
            bool(config.chunked) and config.chunked[layer],
        )

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim

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
    """Programs of a launch with a fixed grid: as many as fit a multiprocessor's memory."""
    max_registers: int | None = None
    """Registers of each thread, so that this many programs fit; None = the compiler's choice."""


def context_tiling(
    shape: HeadShape,
    itemsize: int,
    shared_bytes: int,
    num_tokens: int,
    *,
    in_codes: bool,
) -> Tiling:
    """On GPUs since Hopper, two programs on a multiprocessor, so that one computes a softmax while
    the tensor cores multiply for the other: 128 queries each, so that each key that is read serves
    many products, but 64 in steps with too few tiles of 128. On older GPUs, 128 queries and three
    buffers of keys and values: with two, the copy of a step begins only when the step before has
    been computed. Fewer if the accumulator of wide heads or the shared memory of a small GPU is too
    small, in float32, which has no tensor cores, and for codes, because widening them takes
    registers.

    Args:
        itemsize: of queries.
        shared_bytes: the most shared memory of a program.
        num_tokens: rows of the step.
        in_codes: keys and values are codes.
    """
    is_widest = shape.block_dim > WIDE_DIM
    is_wide, is_small = shape.block_dim > 128, in_codes or shared_bytes < LARGE_SHARED_BYTES
    if itemsize == 4:
        queries, stages = MIN_QUERIES if is_widest and is_small else 32, 1 if is_widest else 2
        return Tiling(max(queries, shape.block_shared), 16, num_warps=8, num_stages=stages)
    if is_widest:
        keys = MIN_KEYS if in_codes else 32
        return Tiling(max(32, shape.block_shared), keys, num_warps=8, num_stages=2)
    if not is_wide and not is_small and shared_bytes >= TWICE_LARGE_BYTES:
        if num_tokens * shape.block_shared * shape.num_kv_heads > LARGE_STEP_ROWS:
            queries = max(128, shape.block_shared)
            return Tiling(queries, 64, num_warps=8, num_stages=2, max_registers=128)
        return Tiling(max(64, shape.block_shared), 64, num_warps=4, num_stages=3)
    if is_small:
        queries, keys, warps = (64, 16, 8) if is_wide else (64, 32, 4)
    else:
        queries, keys, warps = (64, 32, 8) if is_wide else (128, 64, 8)
    return Tiling(max(queries, shape.block_shared), keys, num_warps=warps, num_stages=3)


def generation_tiling(shape: HeadShape, itemsize: int, *, in_codes: bool) -> Tiling:
    """The query heads of one KV head, padded to the smallest product. In half precision there are
    four programs on a multiprocessor, of two warps each, which seldom wait for each other: while
    one computes, the copies of the others are on their way. Codes, which take registers when they
    are widened, come in half as many keys and one buffer more, and for the widest heads to twice as
    many warps."""
    tiling = _generation_tiling(shape, itemsize)
    if not in_codes or itemsize == 4:
        return tiling
    keys = max(MIN_KEYS, tiling.block_keys // 2)
    warps = tiling.num_warps * (2 if shape.block_dim > WIDE_DIM else 1)
    return replace(tiling, block_keys=keys, num_warps=warps, num_stages=tiling.num_stages + 1)


def _generation_tiling(shape: HeadShape, itemsize: int) -> Tiling:
    queries = max(MIN_QUERIES, shape.block_shared)
    is_widest = shape.block_dim > WIDE_DIM
    if itemsize == 4:
        stages = 1 if is_widest else 2
        return Tiling(queries, 16, num_warps=8, num_stages=stages, programs_per_processor=2)
    if is_widest:
        return Tiling(queries, 16, num_warps=4, num_stages=2, programs_per_processor=2)
    if shape.block_dim > 128:
        return Tiling(queries, 32, num_warps=4, num_stages=3, programs_per_processor=2)
    keys = 32 if shape.block_dim > 64 else 64
    return Tiling(queries, keys, num_warps=2, num_stages=3, programs_per_processor=4)


def joined_splits(shape: HeadShape) -> int:
    """Items of a row that are joined at a time."""
    fitting = max(1, JOINED_ELEMENTS // (shape.block_shared * shape.block_dim))
    return min(fitting, MAX_JOINED_SPLITS)
