"""Checks that a GPU benchmark makes before it times anything: a fast wrong kernel is not a
result."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from benchmarks.gpu.bench_runner import BenchRunner
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.types.step_plan import StepPlan

MAX_DIFFERENCE = 2e-2
"""Largest difference between two computations in half precision, relative to the largest value."""


class WrongResult(Exception):
    """The result of what was to be timed differs from that of the reference."""


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; infinite where something is NaN."""
    difference = float((found.float() - expected.float()).abs().max())
    largest = float(expected.float().abs().max())
    return difference / max(largest, 1e-30) if difference == difference else float("inf")


def compare(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises WrongResult, which names `what`, if two results differ by more than rounding."""
    difference = relative_difference(found, expected)
    if not difference <= MAX_DIFFERENCE:
        raise WrongResult(f"{what} differ by {difference:.1e} of the largest value")


@torch.inference_mode()
def check_step(bench: BenchRunner, plan: StepPlan) -> None:
    """Compare what a case is about to time with slower ways to compute the same.

    A step that a graph computes is compared with the same kernels without the graph. At the sites
    of the first and the last layer, base products with the updates of the step's adapters are
    compared with base products and updates in plain torch.

    Raises:
        WrongResult: they differ by more than rounding.
    """
    batches = bench.runner._batches
    gpu, step = batches.gpu, batches.read(plan)
    runs = step.runs
    if gpu is None:
        return
    if (graph := gpu.graph_of(step)) is not None:
        eager = bench.runner._model.forward(batches.make(step)).clone()
        before = torch.zeros(0, dtype=torch.int64, device=bench.device)
        compare(gpu.replay(graph, step, before), eager, "a graph and the same step without it")
    if not runs:
        return
    lora = gpu.lora_batch(runs, plan.num_tokens, step.is_decode)
    sites, linears = bench.runner.layout.sites.sites, bench.runner._model.site_weights.linears
    touched = [sites[site_id] for site_id in sorted(gpu.lora.sites_of(runs))]
    layers = {site.layer for site in touched}
    for site in touched:
        if site.layer not in (min(layers), max(layers)):
            continue
        base = cast(BaseLinear, linears[site.id])  # one rank has all rows of a weight
        x = _random(bench, plan.num_tokens, site.in_features)
        expected = base.apply(x)
        portable.add_lora(expected, x, site.id, LoraBatch(runs, lora.table))
        found = gpu.lora.product(base, x, site.id, lora)
        compare(found, expected, f"the product with adapters at site {site.id} and plain torch")


def _random(bench: BenchRunner, num_rows: int, width: int) -> Tensor:
    dtype = torch.bfloat16 if bench.itemsize == 2 else torch.float32
    generator = torch.Generator(bench.device).manual_seed(width)
    rows = torch.randn(num_rows, width, generator=generator, device=bench.device)
    return rows.to(dtype)
