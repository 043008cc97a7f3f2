"""Sizes of the launches of the low-rank update. Pure functions.

The sizes were chosen on an H200: `benchmarks/gpu/gpu_lora_ops.py --tune` times their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_FUSED_ROWS = 16
"""Rows of a step up to which one launch computes the base product and the update of a site."""
SPLIT_INPUTS = 1024
"""Inputs of one partial sum of the intermediate; fixed, so that sums do not depend on the step."""
TILE_ROWS = 16
"""Token rows of a tile of the update: those of the smallest tensor-core product."""
GRAPH_GROUPS = 1024
"""Groups that the adapters of a step may have in a part so that a captured graph can hold them."""


@dataclass(frozen=True, slots=True)
class SitePlan:
    """Sizes of one launch."""

    block_outputs: int
    block_inputs: int = 64
    """Of a step of the base product."""
    stages: int = 1
    block_ranks: int = 64
    block_shrink: int = 256
    shrink_stages: int = 4
    num_warps: int = 4


def num_splits(num_inputs: int) -> int:
    """Partial sums of the intermediate at a site."""
    return -(-num_inputs // SPLIT_INPUTS)


def num_shrink_programs(num_rows: int) -> int:
    """Programs that compute the intermediate: enough for an adapter of its own for each row."""
    return 64 if num_rows <= 4 else 128 if num_rows <= 16 else 512


def fused_plan(num_inputs: int, num_outputs: int) -> SitePlan:
    """Of a launch that computes the base product as well."""
    narrow = num_outputs <= 4096
    return SitePlan(32 if narrow else 64, 256, 3 if num_outputs > 16384 else 4)


def expand_plan(itemsize: int) -> SitePlan:
    """Of a launch that adds to a base product."""
    if itemsize == 4:
        return SitePlan(64, block_ranks=16, block_shrink=32, shrink_stages=2)
    return SitePlan(128)
