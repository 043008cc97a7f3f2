"""Which kernel family and tile sizes a step's low-rank updates use. Pure functions and a table.

The table holds starting points by reasoning, not by measurement: nothing here has been timed on a
GPU yet. `benchmarks/gpu/gpu_lora_ops.py --tune` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Constants of the shrink and expand launches of one step."""

    uses_dot: bool
    """True: tensor-core tiles. False: rows, multiplied and summed element by element."""
    block_rows: int
    """Token rows of one program's item."""
    block_inputs: int
    """Inputs a shrink program reads at a time."""
    split_inputs: int
    """Inputs of one shrink item; a site has ceil(in / split_inputs) partial sums (planes)."""
    block_outputs: int
    """Outputs of one expand item."""
    num_warps: int = 4
    num_stages: int = 3
    programs_per_processor: int = 8

    def num_planes(self, in_features: int) -> int:
        """Partial sums of a site."""
        return -(-in_features // self.split_inputs)


ROWS_MAX = 2
"""Most rows of one adapter for which summing beats a tensor-core tile that is 7/8 empty."""

WHOLE = 1 << 20
"""As split_inputs: one plane for every site."""

PLANS_HALF = {
    "row": LoraPlan(False, 1, 256, 1024, 256),
    "rows": LoraPlan(False, 2, 256, 1024, 256),
    "tile": LoraPlan(True, 16, 256, 1024, 256),
    "prefill": LoraPlan(True, 64, 64, WHOLE, 128, num_warps=8, programs_per_processor=4),
}
"""For bfloat16 and float16."""

PLANS_FLOAT32 = {
    "row": LoraPlan(False, 1, 256, 1024, 256),
    "rows": LoraPlan(False, 2, 128, 1024, 128),
    "tile": LoraPlan(True, 16, 64, 1024, 64),
    "prefill": LoraPlan(True, 32, 32, WHOLE, 64, programs_per_processor=4),
}
"""float32 products run on ordinary cores: smaller tiles, fewer registers."""


def choose_plan(max_run_rows: int, num_rows: int, itemsize: int) -> LoraPlan:
    """Pick by the longest row run of the step: the rows that share one read of an adapter.

    Args:
        max_run_rows: token rows of the longest run.
        num_rows: token rows of the step.
        itemsize: bytes of an element.
    """
    plans = PLANS_FLOAT32 if itemsize == 4 else PLANS_HALF
    if max_run_rows <= ROWS_MAX:
        return plans["row" if max_run_rows <= 1 else "rows"]
    return plans["tile" if max_run_rows <= 16 or num_rows <= 64 else "prefill"]
