"""Sizes of the launches of the low-rank update. Pure functions.

The sizes were chosen on an H200: `benchmarks/gpu/gpu_lora_ops.py --tune` times their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_FUSED_ROWS = 2
"""Rows of a step up to which one launch computes the base product and the update of a site."""
WIDE_OUTPUTS = 16384
"""Outputs of a site beyond which tiles are wide, and one launch pays for more rows."""
MAX_WIDE_FUSED_ROWS = 16
SPLIT_INPUTS = 1024
"""Inputs of one partial sum of the intermediate; fixed, so that sums do not depend on the step."""
TILE_ROWS = 16
"""Token rows of a tile of the update: those of the smallest tensor-core product."""
GRAPH_GROUPS = 1024
"""Groups that the adapters of a step may have in a part so that a captured graph can hold them."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Sizes of one launch."""

    block_outputs: int
    block_inputs: int = 64
    """Inputs of one step of the base product."""
    stages: int = 1
    block_ranks: int = 32
    block_shrink: int = 256
    shrink_stages: int = 4
    num_warps: int = 4


def num_splits(num_inputs: int) -> int:
    """Partial sums of the intermediate at a site."""
    return -(-num_inputs // SPLIT_INPUTS)


def num_shrink_programs(num_rows: int, shares_launch: bool) -> int:
    """Number of programs that compute the intermediate. If they share a launch with the base
    product, they occupy processors that it could use, so they are few."""
    if not shares_launch:
        return 512
    return 8 if num_rows <= MAX_FUSED_ROWS else 32


def is_fused(num_rows: int, num_outputs: int) -> bool:
    """Whether the base product and the update of a site share a launch."""
    wide = num_outputs > WIDE_OUTPUTS
    return num_rows <= (MAX_WIDE_FUSED_ROWS if wide else MAX_FUSED_ROWS)


FUSED_SHARED_BYTES = 128 << 10
"""Shared memory that a launch with the base product may take. GPUs with less compute the product
in a launch of its own."""


def fused_plan(num_outputs: int) -> LaunchPlan:
    """Plan of a launch that also computes the base product."""
    if num_outputs > WIDE_OUTPUTS:
        return LaunchPlan(128, 128, 3)
    return LaunchPlan(32, 128, 6)


def expand_plan(num_rows: int, num_outputs: int, itemsize: int) -> LaunchPlan:
    """Plan of a launch that adds to a base product."""
    if itemsize == 4:
        return LaunchPlan(64, block_ranks=16, block_shrink=32, shrink_stages=2)
    if num_rows <= 64 and num_outputs <= WIDE_OUTPUTS:
        return LaunchPlan(64, block_ranks=64)
    return LaunchPlan(128)
