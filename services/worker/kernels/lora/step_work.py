"""A step's runs on the device, at fixed addresses, and the work that they are for every site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.kernels.launch import power_of_two
from services.worker.kernels.lora import triton_work
from services.worker.kernels.lora.device_records import float_bits
from services.worker.kernels.lora.device_tables import DeviceTables
from services.worker.kernels.lora.plan import LoraPlan
from services.worker.kernels.lora.runs import RowRun

MIN_RUNS = 256
"""Steps with fewer runs share compiled kernels: none is compiled while requests wait."""


class StepWork:
    """Room for the runs of one step and for what kernels compute from them.

    Runs of one `StepWork` cover disjoint rows: rows that combine adapters take several.
    """

    def __init__(
        self,
        tables: DeviceTables,
        max_runs: int,
        plan: LoraPlan,
        rank_stride: int,
        runs: Tensor | None = None,
    ) -> None:
        """
        Args:
            max_runs: rounded up to a power of two.
            rank_stride: floats of a row of the planes; no adapter of the step has more ranks.
            runs: int32 `[max_runs, 4]` on the device that somebody else fills, in place of `fill`.
        """
        device = tables.arena.device
        self.tables = tables
        self.plan = plan
        self.rank_stride = rank_stride
        self.max_runs = max(MIN_RUNS, power_of_two(max_runs))
        if runs is None:
            runs = torch.zeros((self.max_runs, 4), dtype=torch.int32, device=device)
        assert runs.shape == (self.max_runs, 4), runs.shape
        self.runs = runs
        self.ends = torch.zeros(
            (2, tables.num_sites, self.max_runs), dtype=torch.int32, device=device
        )

    def fill(self, runs: Sequence[RowRun]) -> None:
        """Copy a step's runs to the device; `count` must follow."""
        assert len(runs) <= self.max_runs, (len(runs), self.max_runs)
        self.runs.copy_(runs_tensor(runs, self.max_runs), non_blocking=True)

    def count(self) -> None:
        """Count the items of all sites in one launch."""
        tables, short, long = self.tables, self.plan.short, self.plan.long
        triton_work.count_work[(tables.num_sites,)](
            self.runs,
            tables.index,
            tables.records,
            tables.in_features,
            self.ends,
            tables.num_sites,
            self.plan.short_max,
            short.block_rows,
            short.block_ranks,
            short.split_inputs,
            short.block_outputs,
            long.block_rows,
            long.block_ranks,
            long.split_inputs,
            long.block_outputs,
            MAX_RUNS=self.max_runs,
        )


def runs_tensor(runs: Sequence[RowRun], max_runs: int) -> Tensor:
    """int32 `[max_runs, 4]` on the host: slot, begin, end, float32 bits of the coefficient."""
    words = [(run.slot, run.begin, run.end, float_bits(run.coef)) for run in runs]
    words += [(0, 0, 0, 0)] * (max_runs - len(words))
    table = torch.tensor(words, dtype=torch.int32)
    return table.pin_memory() if torch.cuda.is_available() else table
