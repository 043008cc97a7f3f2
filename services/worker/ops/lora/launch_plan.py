"""Sizes of the launches of the low-rank update. Pure functions.

The sizes were chosen on an H200 by timing their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_FUSED_ROWS = 8
"""Rows of a step up to which one launch computes the base product and the update of a site."""
WIDE_OUTPUTS = 16384
"""Outputs of a site beyond which tiles are wide, and one launch pays for more rows."""
MAX_WIDE_FUSED_ROWS = 16
MIN_SPLIT_INPUTS = 1024
"""Inputs of one partial sum of the intermediate, at least."""
BLOCK_SHRINK = 256
"""Inputs that a program multiplies at a time for the intermediate."""
MAX_SHRINK_PROGRAMS = 512
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
    block_shrink: int = BLOCK_SHRINK
    shrink_stages: int = 4
    num_warps: int = 4


def split_inputs(num_inputs: int, num_parts: int) -> int:
    """Inputs of one partial sum of the intermediate at a site. It depends on the site only, so that
    sums do not depend on the step."""
    most = 4 if num_parts == 1 else 2
    num = min(most, -(-num_inputs // MIN_SPLIT_INPUTS))
    return -(-num_inputs // (num * BLOCK_SHRINK)) * BLOCK_SHRINK


def num_splits(num_inputs: int, num_parts: int) -> int:
    """Partial sums of the intermediate at a site."""
    return -(-num_inputs // split_inputs(num_inputs, num_parts))


def num_shrink_programs(num_rows: int, num_items: int, shares_launch: bool) -> int:
    """Number of programs that compute the intermediate.

    Args:
        num_items: splits of a group in every part. A row's adapter has more items if its rank is
            above 16 or its tiles are cut at the ends of blocks.
        shares_launch: with the base product, which could use the processors that they occupy.
    """
    if shares_launch:
        return 8 if num_rows <= 2 else 32
    return min(MAX_SHRINK_PROGRAMS, 2 * num_rows * num_items)


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
        return LaunchPlan(64, block_ranks=16, block_shrink=64, shrink_stages=2)
    if num_rows <= 64 and num_outputs <= WIDE_OUTPUTS:
        return LaunchPlan(64, block_ranks=64)
    return LaunchPlan(128)
