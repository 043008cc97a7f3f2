"""Launches of the low-rank update on GPUs, without synchronizing with the host.

`StepWork` lists a step's groups once for all sites. Then each site takes one launch with its base
product (`MAX_FUSED_ROWS` and fewer rows), or two launches around a library's product. Counts stay
on the device and grids are fixed, so a captured graph serves any mix of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.ops.launch import must_widen, shared_bytes
from loraplex_services.worker.ops.linear.torch import BaseLinear, DenseLinear
from loraplex_services.worker.ops.lora import triton_kernels as kernels
from loraplex_services.worker.ops.lora.device_records import MAX_PARTS
from loraplex_services.worker.ops.lora.device_tables import (
    ALIGNED_ELEMENTS,
    DeviceTables,
    SiteShape,
)
from loraplex_services.worker.ops.lora.launch_plan import (
    FUSED_SHARED_BYTES,
    TILE_ROWS,
    LaunchPlan,
    expand_plan,
    fused_plan,
    is_fused,
    num_shrink_programs,
    num_splits,
    split_inputs,
)
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.side_stream import SideStream
from loraplex_services.worker.ops.lora.step_work import StepWork, work_size
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class DeviceLora:
    """Tables of one runner; makes the work of each step and launches it."""

    def __init__(self, tables: DeviceTables, side: SideStream | None = None) -> None:
        """`side`: where intermediates are computed during a library's base product; None = after
        it."""
        self.tables = tables
        self._side = side

    def begin(self, runs: Sequence[RowRun], num_rows: int) -> StepWork:
        """Upload a step's runs and list their groups at every site."""
        work = StepWork(self.tables, work_size(self.tables, runs, num_rows))
        work.fill(runs)
        work.list_groups(num_rows)
        return work

    def product(self, base: BaseLinear, x: Tensor, site_id: int, lora: LoraBatch) -> Tensor:
        """`[T, in]` -> `[T, out]`: the base product and the update of a site."""
        if not self.touches(lora, site_id):
            return base.apply(x)
        if lora.long is None and lora.work is not None and can_fuse(x, base):
            assert isinstance(base, DenseLinear)
            y = torch.empty(len(x), base.out_features, dtype=x.dtype, device=x.device)
            launch(y, x, site_id, lora.work, base.weight)
            return y
        if self._side is None or not lora.has_work:
            y = base.apply(x)
            self.add_lora(y, x, site_id, lora)
            return y
        with self._side.fork():
            _shrink(x, site_id, lora)
        y = base.apply(x)
        self._side.join()
        _expand(y, x, site_id, lora)
        return y

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `torch.add_lora`. The work of a batch that has none yet (chosen rows) is made
        here."""
        if not self.touches(lora, site_id):
            return
        if not lora.has_work:
            lora = replace(lora, work=self.begin(lora.runs, len(x)))
        _shrink(x, site_id, lora)
        _expand(y, x, site_id, lora)

    def touches(self, lora: LoraBatch, site_id: int) -> bool:
        """Whether kernels have anything to add at a site."""
        if lora.sites is not None:
            return site_id in lora.sites
        return any(site_id in self.tables.entered(run.slot).sites for run in lora.runs)

    def sites_of(self, runs: Sequence[RowRun]) -> frozenset[int]:
        """All sites where kernels have anything to add for these runs."""
        sites = (self.tables.entered(slot).sites for slot in {run.slot for run in runs})
        return frozenset[int]().union(*sites)


def can_fuse(x: Tensor, base: BaseLinear) -> bool:
    """Whether one launch computes the base product with the update."""
    (num_rows, num_inputs), num_outputs = x.shape, base.out_features
    return (
        isinstance(base, DenseLinear)
        and x.dtype in (torch.bfloat16, torch.float16)
        and not must_widen(x.dtype)
        and is_fused(num_rows, num_outputs)
        and shared_bytes(x.device) >= FUSED_SHARED_BYTES
        and base.weight.is_contiguous()
        and num_inputs % fused_plan(num_outputs).block_inputs == 0
    )


def _shrink(x: Tensor, site_id: int, lora: LoraBatch) -> None:
    """Compute the intermediates of long and short runs."""
    if lora.long is not None:
        lora.long.shrink(x, site_id)
    if lora.work is not None:
        launch(None, x, site_id, lora.work)


def _expand(y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
    """Add B times the intermediates of long and short runs to y."""
    if lora.long is not None:
        lora.long.expand(y, site_id)
    if lora.work is not None:
        launch(y, x, site_id, lora.work)


def launch(
    y: Tensor | None,
    x: Tensor,
    site_id: int,
    work: StepWork,
    base_weight: Tensor | None = None,
) -> None:
    """One launch of `update_site`. One without y and then one with y compute

        y[t] = gain * (y[t] + coef * (scale * B (A x[t]) + lora bias)) + bias delta

    and one with a base weight computes all of it, together with the base's product.

    Args:
        y: `[T, out]`, contiguous rows, with the base's product unless there is a base weight.
            Mutated; None = compute the intermediate only.
        x: `[T, in]`, contiguous rows, of the dtype of y.
        work: runs over the T rows, with their groups listed.
        base_weight: `[out, in]`.
    """
    tables = work.tables
    shape = tables.shapes[site_id]
    num_rows, num_inputs = x.shape
    outputs = x if y is None else y
    assert x.stride(1) == outputs.stride(1) == 1, (x.stride(), outputs.stride())
    assert num_inputs == shape.num_inputs, (num_inputs, shape)
    ends = [part.end for part in shape.parts]
    plan = _plan(x, ends[-1], base_weight)
    shrinks, expands = y is None or base_weight is not None, y is not None
    num_row_tiles = -(-num_rows // TILE_ROWS)
    assert num_row_tiles <= work.max_tiles, (num_rows, work.max_tiles)
    num_items = len(ends) * num_splits(num_inputs, len(ends))
    num_shrink = num_shrink_programs(num_rows, num_items, expands) if shrinks else 0
    num_tiles = sum(-(-part.length // plan.block_outputs) for part in shape.parts) * num_row_tiles
    kernels.update_site[(num_shrink + num_tiles * expands,)](
        outputs,
        x,
        outputs if base_weight is None else base_weight,
        tables.matrices,
        tables.vectors,
        *work.arrays(x.dtype),
        tables.first_part[site_id],
        work.max_groups,
        work.max_tiles,
        *ends,
        *[ends[-1]] * (MAX_PARTS - len(ends)),
        num_rows,
        num_inputs,
        x.stride(0),
        outputs.stride(0),
        num_shrink,
        num_row_tiles,
        work.max_vectors,
        **constants_of(plan, shape, x.dtype, tables.is_int8, shrinks, expands),
        num_warps=plan.num_warps,
    )


def constants_of(
    plan: LaunchPlan,
    shape: SiteShape,
    dtype: torch.dtype,
    is_int8: bool,
    shrinks: bool,
    expands: bool,
) -> dict[str, Any]:
    """The compile-time constants of `update_site`; `dtype` is that of x and y. A launch that does
    both also computes the base's product."""
    return {
        "NUM_PARTS": len(shape.parts),
        "SPLITS": num_splits(shape.num_inputs, len(shape.parts)),
        "SPLIT_INPUTS": split_inputs(shape.num_inputs, len(shape.parts)),
        "BLOCK_OUTPUTS": plan.block_outputs,
        "BLOCK_INPUTS": plan.block_inputs,
        "BLOCK_RANKS": plan.block_ranks,
        "BLOCK_SHRINK": plan.block_shrink,
        "SHRINKS": shrinks,
        "EXPANDS": expands,
        "HAS_CUTS": shape.may_be_cut,
        "INT8": is_int8,
        "WIDEN": must_widen(dtype),
        "ALIGN": ALIGNED_ELEMENTS if shape.is_aligned else 1,
        "STAGES": plan.stages,
        "SHRINK_STAGES": plan.shrink_stages,
    }


def _plan(x: Tensor, num_outputs: int, base_weight: Tensor | None) -> LaunchPlan:
    if base_weight is None:
        return expand_plan(len(x), num_outputs, x.itemsize)
    return fused_plan(num_outputs)
