"""Which kernel families and tile sizes a step's low-rank updates use. Pure functions and a table.

The table holds starting points by reasoning, not by measurement: nothing here has been timed on a
GPU yet. `benchmarks/gpu/gpu_lora_ops.py --tune` measures the alternatives and writes a file that
`tuned.py` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one family's items."""

    uses_dot: bool
    """True: tensor-core tiles. False: rows, multiplied and summed element by element."""
    block_rows: int
    """Token rows of one item."""
    block_inputs: int
    """Inputs a shrink program reads at a time."""
    split_inputs: int
    """Inputs of one shrink item; a site has ceil(in / split_inputs) partial sums (planes)."""
    block_outputs: int
    """Outputs of one expand item."""
    block_ranks: int = 16
    """Most rank rows of one shrink item; above 16 the program chooses among 16, 32 and this."""

    def num_planes(self, in_features: int) -> int:
        """Partial sums of a site."""
        return -(-in_features // self.split_inputs)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Constants of the shrink and expand launches of one step: two families, chosen on the device
    for each run by its length."""

    short: Tiling
    long: Tiling
    short_max: int
    """Most rows of a run that the short family computes."""
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 8

    def num_planes(self, in_features: int) -> int:
        """Most partial sums of a site."""
        return max(self.short.num_planes(in_features), self.long.num_planes(in_features))

    def with_fewer_planes(self) -> LoraPlan:
        """The same with splits twice as wide."""
        return replace(
            self,
            short=replace(self.short, split_inputs=2 * self.short.split_inputs),
            long=replace(self.long, split_inputs=2 * self.long.split_inputs),
        )


ROW_HALF = Tiling(False, 1, 256, 1024, 256)
TILE_HALF = Tiling(True, 16, 256, 1024, 256)
ROW_FLOAT32 = Tiling(False, 1, 256, 1024, 256)
TILE_FLOAT32 = Tiling(True, 16, 64, 1024, 64)

PLANS_HALF = {
    "decode": LoraPlan(ROW_HALF, TILE_HALF, short_max=1),
    "mixed": LoraPlan(TILE_HALF, Tiling(True, 64, 64, 1024, 128, 64), 16, 4, 3, 4),
    "prefill": LoraPlan(TILE_HALF, Tiling(True, 64, 64, 4096, 128, 64), 16, 4, 3, 4),
}
"""For bfloat16 and float16."""

PLANS_FLOAT32 = {
    "decode": LoraPlan(ROW_FLOAT32, TILE_FLOAT32, short_max=1),
    "mixed": LoraPlan(TILE_FLOAT32, Tiling(True, 32, 32, 1024, 64), 16, 4, 3, 4),
    "prefill": LoraPlan(TILE_FLOAT32, Tiling(True, 32, 32, 4096, 64), 16, 4, 3, 4),
}
"""float32 products run on ordinary cores: smaller tiles, fewer registers."""

PREFILL_ROWS = 1024
"""Rows of a step from which row blocks alone fill a device, so that inputs are split less."""

DENSE_MIN_ROWS = 1024
DENSE_MIN_RANK = 128
"""Of a site's stacked A. A shrink reads each number of x once and does 2 * rank operations with
it; a tile kernel that reaches a third of an H200's 989 TFLOP/s is bound by its 4.8 TB/s up to a
rank of about 70, and a library product up to about 200."""
DENSE_SHARE = 0.9


def is_dense(run_rows: int, num_rows: int, rank: int) -> bool:
    """Whether library products compute a run, instead of tiles.

    Args:
        run_rows: token rows of the run.
        num_rows: token rows of the step.
        rank: of the adapter's widest stacked A.
    """
    covers = run_rows >= DENSE_SHARE * num_rows
    return covers and run_rows >= DENSE_MIN_ROWS and rank >= DENSE_MIN_RANK


def family_of(max_run_rows: int, num_rows: int) -> str:
    """Key of the plans.

    Args:
        max_run_rows: token rows of the longest run: those that share one read of an adapter.
        num_rows: token rows of the step.
    """
    if max_run_rows <= 16 or num_rows <= 64:
        return "decode"
    return "mixed" if num_rows < PREFILL_ROWS else "prefill"
