"""Decode steps on a GPU: share of the base (the same engine, LoRA compiled out) and of the floor.

    python -m benchmarks.gpu.decode [--shape llama-3-8b] [--device cpu --tiny]

Random weights, a context of 1k, one token a step, graphs on; adapters are distinct copies in the
arena. `step_ms` is one engine step with sampling, host included; `gpu_ms` the captured part alone.
Every case is compared with a reference before it is timed (see `checks`).

Two more tables follow. `contexts` holds the base with sequences of uneven lengths compared with
even ones that have as many tokens together: the floor of both is the same, so their times should
be. `base_only` holds the base in an engine with room for adapters, with 64 of them resident, over
an engine with room for one and none resident.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import common
from benchmarks.gpu.bench_runner import BenchRunner, parse, runner_parser, spread
from benchmarks.gpu.checks import check_step
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import ALL_SEVEN, ATTENTION, Shape
from loraplex_services.worker.types.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences and the adapters they share, spread evenly."""

    batch_size: int
    num_adapters: int
    rank: int
    targets: tuple[str, ...]


CASES = (
    Case(64, 64, 16, ALL_SEVEN),
    Case(64, 4, 16, ALL_SEVEN),
    Case(64, 64, 16, ATTENTION),
    Case(64, 1, 16, ATTENTION),
    Case(1, 1, 16, ALL_SEVEN),
    Case(8, 4, 16, ALL_SEVEN),
    *(Case(size, 1, 16, ATTENTION) for size in (1, 8)),
    *(Case(size, size, 16, targets) for size in (8, 32) for targets in (ATTENTION, ALL_SEVEN)),
    *(Case(64, 64, rank, ATTENTION) for rank in (8, 64, 128)),
    Case(64, 64, 64, ALL_SEVEN),
    Case(256, 64, 16, ALL_SEVEN),
    *(Case(256, 256, 16, targets) for targets in (ATTENTION, ALL_SEVEN)),
)
"""Cases with a target come first, because a run may be cut short."""
TINY_CASES = (Case(2, 2, 8, ATTENTION), Case(3, 1, 4, ALL_SEVEN))


UNEVEN = {
    "256 to 8k": [round(256 * 32 ** (i / 63)) for i in range(64)],
    "one of 32k among 1k": [32 * 1024] + [1024] * 63,
    "one of 8k, alone": [8 * 1024],
}
TINY_UNEVEN = {"4 to 48": [4, 20, 48]}
"""Context of every sequence."""

MAX_HOST_STEPS = 50
"""Steps timed with the host included; the GPU alone is timed for all of `--steps`."""


def main() -> int:
    """Measure, print, write; returns how many settings failed."""
    args = parse_args()
    shape = SHAPES[args.shape]
    facts = {"shape": shape.name, "context": args.context, "steps": args.steps}
    results = Results(f"decode_{shape.name}", args, **facts)
    with tempfile.TemporaryDirectory() as scratch:
        contexts = TINY_UNEVEN if args.tiny else UNEVEN
        longest = 2 * max(max(lens) for lens in contexts.values())
        bench = BenchRunner(shape, Path(scratch), args, max_num_tokens=2048, max_model_len=longest)
        bandwidth = common.copy_bytes_per_s(bench.device, is_tiny=args.tiny)
        results.note(copy_bytes_per_s=bandwidth)
        bases: dict[int, dict[str, float]] = {}
        for case in TINY_CASES if args.tiny else CASES:
            with results.setting(str(case)):
                results.add("rows", run_case(bench, case, bases, bandwidth, args))
        compare_contexts(bench, contexts, bandwidth, results, args)
        with results.setting("base only"):
            crowded = crowded_base_times(bench, args)
            del bench
            free_memory(args)
            compare_base_only(crowded, base_times(shape, Path(scratch), args), results)
    return results.end()


def free_memory(args: argparse.Namespace) -> None:
    """Give back the memory of a runner that nothing refers to."""
    gc.unfreeze()  # a runner freezes what it is made of
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def base_times(
    shape: Shape, scratch: Path, args: argparse.Namespace
) -> dict[int, dict[str, float]]:
    """Milliseconds of a base step by batch size, in an engine with room for one small adapter."""
    sizes = base_only_batches(args)
    num_bytes = shape.kv_bytes(2 * max(sizes) * args.context, 2) + (64 << 20)
    options = argparse.Namespace(**{**vars(args), "arena_bytes": args.arena_bytes or num_bytes})
    bench = BenchRunner(shape, scratch / "bare", options, max_num_tokens=2048, max_resident=1)
    times = {}
    for size in sizes:
        bench.clear()
        times[size] = measure(bench, spread(size, 0), args)
    return times


def crowded_base_times(bench: BenchRunner, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Milliseconds of a base step by batch size, where adapters are resident that nobody uses."""
    times = {}
    for size in base_only_batches(args):
        bench.clear()
        bench.load([16] * (2 if args.tiny else 64), ATTENTION)
        times[size] = measure(bench, spread(size, 0), args)
    return times


def base_only_batches(args: argparse.Namespace) -> tuple[int, ...]:
    """Rows of the steps that compare bases."""
    return (1,) if args.tiny else (1, 64)


def compare_base_only(
    crowded: dict[int, dict[str, float]], bare: dict[int, dict[str, float]], results: Results
) -> None:
    """The cost for the base of room for adapters, and of adapters that nobody uses."""
    for size, alone in bare.items():
        times = crowded[size]
        best = "gpu_ms" if "gpu_ms" in times else "step_ms"
        row = {"batch": size, **times, **{f"bare_{name}": ms for name, ms in alone.items()}}
        row["over_bare"] = times[best] / alone[best]
        row["over_bare_with_host"] = times["step_ms"] / alone["step_ms"]
        results.add("base_only", row)


def compare_contexts(
    bench: BenchRunner,
    contexts: dict[str, list[int]],
    bandwidth: float,
    results: Results,
    args: argparse.Namespace,
) -> None:
    """Uneven contexts compared with even ones of as many tokens."""
    for name, lens in contexts.items():
        with results.setting(f"contexts {name}"):
            results.add("contexts", contexts_row(bench, name, lens, bandwidth, args))


def contexts_row(
    bench: BenchRunner, name: str, lens: list[int], bandwidth: float, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of that table. Raises DoesNotFit and WrongResult."""
    mean = round(sum(lens) / len(lens))
    times = {}
    for kind, these in (("even", [mean] * len(lens)), ("uneven", lens)):
        bench.clear()
        plan = bench.decode_plan(spread(len(lens), 0), these)
        check_step(bench, plan)
        times[kind] = times_of(bench, plan, args)
    best = "gpu_ms" if "gpu_ms" in times["even"] else "step_ms"
    num_bytes = bench.itemsize * bench.shape.num_layer_weights
    floor_s = (num_bytes + bench.shape.kv_bytes(sum(lens), bench.itemsize)) / bandwidth
    row: dict[str, Any] = {"contexts": name, "batch": len(lens), "tokens": sum(lens)}
    row |= {f"{kind}_{best}": times[kind][best] for kind in times}
    row["uneven_over_even"] = times["uneven"][best] / times["even"][best]
    row["share_of_floor"] = floor_s * 1e3 / times["uneven"][best]
    return row


def run_case(
    bench: BenchRunner,
    case: Case,
    bases: dict[int, dict[str, float]],
    bandwidth: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One row of the table. Mutates: bases, by batch size. Raises DoesNotFit."""
    size, context, itemsize = case.batch_size, args.context, bench.itemsize
    if size not in bases:
        bench.clear()
        bases[size] = measure(bench, spread(size, 0), args)
    bench.clear()
    bench.load([case.rank] * case.num_adapters, case.targets)
    times, base = measure(bench, spread(size, case.num_adapters), args), bases[size]
    adapter_bytes = itemsize * bench.shape.num_adapter_weights(case.rank, case.targets)
    floors = [
        common.floor_s(bench.shape, size, context, n, adapter_bytes, itemsize, bandwidth)
        for n in (0, case.num_adapters)
    ]
    best = "gpu_ms" if "gpu_ms" in times else "step_ms"
    return {
        "batch": size,
        "adapters": case.num_adapters,
        "rank": case.rank,
        "modules": len(case.targets),
        **times,
        "share_of_base": base[best] / times[best],
        "share_of_base_with_host": base["step_ms"] / times["step_ms"],
        "share_of_base_at_floor": floors[0] / floors[1],
        "share_of_floor": floors[1] * 1e3 / times[best],
    }


def measure(
    bench: BenchRunner, slots: list[int | None], args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a step, once its result is that of the reference. Raises WrongResult."""
    plan = bench.decode_plan(slots, args.context)
    check_step(bench, plan)
    return times_of(bench, plan, args)


def times_of(bench: BenchRunner, plan: StepPlan, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step, with the host and, where a graph computes it, of the GPU alone."""
    times = {"step_ms": bench.step_s(plan, min(args.steps, MAX_HOST_STEPS)) * 1e3}
    if (graph_s := bench.graph_s(plan, args.steps)) is not None:
        times["gpu_ms"] = graph_s * 1e3
    return times


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=200)
    return parse(parser, context=32, steps=3, arena_bytes=8 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
