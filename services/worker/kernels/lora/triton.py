"""The low-rank update on GPUs: three launches a step and site, nothing on the host in between.

`StepWork` holds a step's runs at fixed addresses and counts its work once for all sites;
`add_lora` shrinks and expands one site. Counts stay on the device and grids are fixed, so a
captured graph serves any mix of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.launch import must_widen, num_programs
from services.worker.kernels.lora import triton_kernels as kernels
from services.worker.kernels.lora.dense import add_dense
from services.worker.kernels.lora.device_tables import DeviceTables
from services.worker.kernels.lora.plan import LoraPlan, is_dense
from services.worker.kernels.lora.runs import RowRun, disjoint_passes
from services.worker.kernels.lora.side_stream import SideStream
from services.worker.kernels.lora.step_work import StepWork
from services.worker.kernels.lora.tuned import tuned_plan
from services.worker.kernels.lora.worklist import LoraBatch

RANK_STRIDE_STEP = 16
ALIGNED_ELEMENTS = 16


def rank_stride_of(num_ranks: int) -> int:
    """Floats of a row of the planes: a multiple of 16, so that kernels know them to be aligned."""
    return max(RANK_STRIDE_STEP, -(-num_ranks // RANK_STRIDE_STEP) * RANK_STRIDE_STEP)


class Planes:
    """Float32 workspace for the rank-sized intermediate, `[planes, rows, ranks]`; one for all."""

    def __init__(self, max_rows: int, max_ranks: int, device: torch.device) -> None:
        """`max_ranks`: the widest stacked A, over all sites."""
        self.max_ranks = rank_stride_of(max_ranks)
        self.data = torch.empty(max_rows * self.max_ranks, dtype=torch.float32, device=device)

    def holds(self, num_planes: int, num_rows: int, rank_stride: int) -> bool:
        """Whether that many fit."""
        return num_planes * num_rows * rank_stride <= len(self.data)

    def fit(self, plan: LoraPlan, num_rows: int, rank_stride: int, max_inputs: int) -> LoraPlan:
        """The plan with as many planes as there is room for, one at the least.

        Args:
            max_inputs: the widest site.
        """
        while not self.holds(plan.num_planes(max_inputs), num_rows, rank_stride):
            assert plan.num_planes(max_inputs) > 1, (num_rows, rank_stride, len(self.data))
            plan = plan.with_fewer_planes()
        return plan


class DeviceLora:
    """Tables and workspace of one runner; makes the work of each step."""

    def __init__(
        self,
        tables: DeviceTables,
        planes: Planes,
        max_inputs: int,
        side: SideStream | None = None,
    ) -> None:
        """
        Args:
            max_inputs: the widest site that kernels serve.
            side: where shrinks run beside the base product; None = after it.
        """
        self.tables = tables
        self.planes = planes
        self._max_inputs = max_inputs
        self._side = side
        self._started: StepWork | None = None

    def begin(self, runs: Sequence[RowRun], num_rows: int, itemsize: int) -> tuple[StepWork, ...]:
        """Upload a step's runs and count the items of every site."""
        works = []
        rank_stride = self.rank_stride(runs)
        for part in disjoint_passes(runs):
            longest = max(run.end - run.begin for run in part)
            plan = tuned_plan(longest, num_rows, itemsize, self.tables.arena.device)
            plan = self.fit(plan, num_rows, rank_stride)
            work = StepWork(self.tables, len(part), plan, rank_stride)
            work.fill(part)
            work.count()
            works.append(work)
        return tuple(works)

    def start(self, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """Shrink on the side while the base product runs; `add_lora` of the same x follows."""
        if self._side is not None and lora.works and self.touches(lora, site_id):
            self._started = lora.works[0]
            with self._side.fork():
                shrink(x, site_id, self._started, self.planes)

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """As `torch.add_lora`; a batch without works of its own (chosen rows) gets them here."""
        if not self.touches(lora, site_id):
            return
        works = lora.works
        if works is None:
            works = self.begin(lora.runs, len(x), x.itemsize)
        for run in lora.dense:
            if (delta := lora.table.get((run.slot, site_id))) is not None:
                add_dense(y, x, delta, run)
        for work in works:
            if work is self._started:
                assert self._side is not None, "only a side stream starts early"
                self._side.join()
                self._started = None
            else:
                shrink(x, site_id, work, self.planes)
            expand(y, x.shape[1], site_id, work, self.planes)

    def dense_runs(self, runs: Sequence[RowRun], num_rows: int) -> tuple[RowRun, ...]:
        """Those of a step that library products compute; rows that combine adapters are in none."""
        if len(disjoint_passes(runs)) != 1:
            return ()
        ranks = self.tables.max_ranks
        return tuple(r for r in runs if is_dense(r.end - r.begin, num_rows, ranks(r.slot)))

    def fit(self, plan: LoraPlan, num_rows: int, rank_stride: int) -> LoraPlan:
        """See `Planes.fit`."""
        return self.planes.fit(plan, num_rows, rank_stride, self._max_inputs)

    def rank_stride(self, runs: Sequence[RowRun]) -> int:
        """Floats of a row of the planes that the adapters of a step need."""
        return rank_stride_of(max((self.tables.max_ranks(run.slot) for run in runs), default=0))

    def touches(self, lora: LoraBatch, site_id: int) -> bool:
        """Whether kernels have anything to add at a site."""
        if lora.sites is not None:
            return site_id in lora.sites
        return any(site_id in self.tables.sites_of(run.slot) for run in lora.runs)

    def sites_of(self, runs: Sequence[RowRun]) -> frozenset[int]:
        """All sites where kernels have anything to add for these runs."""
        sites = (self.tables.sites_of(slot) for slot in {run.slot for run in runs})
        return frozenset[int]().union(*sites)


def add_lora(y: Tensor, x: Tensor, site_id: int, work: StepWork, planes: Planes) -> None:
    """Semantics: y[t] = gain * (y[t] + coef * (scale * B (A x[t]) + lora bias)) + bias delta.

    Args:
        y: `[T, out]`, the base's product, contiguous rows. Mutated.
        x: `[T, in]`, same dtype as y and the tiles, contiguous rows.
        site_id: which entries of the tables apply.
        work: runs over the T rows, counted for this site.
        planes: workspace; its contents are void afterwards.
    """
    shrink(x, site_id, work, planes)
    expand(y, x.shape[1], site_id, work, planes)


def shrink(x: Tensor, site_id: int, work: StepWork, planes: Planes) -> None:
    """planes[p, t, r] = partial sums of A x[t]; see `add_lora`."""
    tables, plan = work.tables, work.plan
    num_rows, num_inputs = x.shape
    assert x.stride(1) == 1, x.stride()
    assert planes.holds(plan.num_planes(num_inputs), num_rows, work.rank_stride), (plan, x.shape)
    kernels.shrink[(num_programs(x.device, plan.programs_per_processor),)](
        x,
        planes.data,
        tables.arena,
        work.runs,
        tables.index,
        tables.records,
        work.ends,
        site_id,
        tables.num_sites,
        num_inputs,
        x.stride(0),
        num_rows * work.rank_stride,
        work.rank_stride,
        **shrink_constants(plan, work.max_runs, x.dtype, _alignment(tables, site_id), tables.int8),
        num_warps=plan.num_warps,
    )


def expand(y: Tensor, num_inputs: int, site_id: int, work: StepWork, planes: Planes) -> None:
    """Add B times the intermediate in place; see `add_lora`."""
    tables, plan = work.tables, work.plan
    assert y.stride(1) == 1, y.stride()
    alignment = _alignment(tables, site_id)
    kernels.expand[(num_programs(y.device, plan.programs_per_processor),)](
        y,
        planes.data,
        tables.arena,
        work.runs,
        tables.index,
        tables.records,
        work.ends,
        site_id,
        tables.num_sites,
        y.stride(0),
        len(y) * work.rank_stride,
        work.rank_stride,
        **expand_constants(plan, work.max_runs, num_inputs, y.dtype, alignment, tables.int8),
        num_warps=plan.num_warps,
    )


def shrink_constants(
    plan: LoraPlan, max_runs: int, dtype: torch.dtype, alignment: int, int8: bool = False
) -> dict[str, Any]:
    """What the kernel `shrink` is compiled for."""
    short, long = plan.short, plan.long
    return {
        "MAX_RUNS": max_runs,
        "SHORT_MAX": plan.short_max,
        "SHORT_ROWS": short.block_rows,
        "SHORT_RANKS": short.block_ranks,
        "SHORT_INPUTS": short.block_inputs,
        "SHORT_SPLIT": short.split_inputs,
        "SHORT_DOT": short.uses_dot,
        "LONG_ROWS": long.block_rows,
        "LONG_RANKS": long.block_ranks,
        "LONG_INPUTS": long.block_inputs,
        "LONG_SPLIT": long.split_inputs,
        "INT8": int8,
        "WIDEN": must_widen(dtype),
        "ALIGN": alignment,
        "STAGES": plan.num_stages,
    }


def expand_constants(
    plan: LoraPlan,
    max_runs: int,
    num_inputs: int,
    dtype: torch.dtype,
    alignment: int,
    int8: bool = False,
) -> dict[str, Any]:
    """What the kernel `expand` is compiled for."""
    short, long = plan.short, plan.long
    return {
        "MAX_RUNS": max_runs,
        "SHORT_MAX": plan.short_max,
        "SHORT_ROWS": short.block_rows,
        "SHORT_OUTPUTS": short.block_outputs,
        "SHORT_PLANES": short.num_planes(num_inputs),
        "SHORT_DOT": short.uses_dot,
        "LONG_ROWS": long.block_rows,
        "LONG_OUTPUTS": long.block_outputs,
        "LONG_PLANES": long.num_planes(num_inputs),
        "INT8": int8,
        "WIDEN": must_widen(dtype),
        "ALIGN": alignment,
        # No tile of integers is copied ahead: for sm_80 Triton 3.7.1 cannot compile that.
        "STAGES": 1 if int8 else plan.num_stages,
    }


def _alignment(tables: DeviceTables, site_id: int) -> int:
    return ALIGNED_ELEMENTS if tables.is_aligned[site_id] else 1
