"""Decode steps on a GPU: share of the base (the same engine, LoRA compiled out) and of the floor.

    python -m benchmarks.gpu.gpu_decode [--shape llama-3-8b] [--device cpu --tiny]

Random weights, a context of 1k, one token a step, graphs on; adapters are distinct copies in the
arena. `step_ms` is one engine step with sampling, host included; `gpu_ms` the captured part alone.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import common
from benchmarks.gpu.bench_runner import BenchRunner, DoesNotFit, add_runner_options, spread
from benchmarks.gpu.common import SHAPES
from benchmarks.llama import ALL_SEVEN, ATTENTION


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences and the adapters they share, spread evenly."""

    batch_size: int
    num_adapters: int
    rank: int
    targets: tuple[str, ...]


CASES = (
    Case(64, 64, 16, ATTENTION),
    Case(64, 64, 16, ALL_SEVEN),
    Case(64, 1, 16, ATTENTION),
    Case(64, 4, 16, ALL_SEVEN),
    *(Case(size, 1, 16, ATTENTION) for size in (1, 8)),
    Case(8, 4, 16, ALL_SEVEN),
    *(Case(size, size, 16, targets) for size in (8, 32) for targets in (ATTENTION, ALL_SEVEN)),
    *(Case(64, 64, rank, ATTENTION) for rank in (8, 64, 128)),
    Case(64, 64, 64, ALL_SEVEN),
    Case(256, 64, 16, ALL_SEVEN),
    *(Case(256, 256, 16, targets) for targets in (ATTENTION, ALL_SEVEN)),
)
"""Those with a bar to reach first: a run may be cut short."""
TINY_CASES = (Case(2, 2, 8, ATTENTION), Case(3, 1, 4, ALL_SEVEN))


MAX_HOST_STEPS = 50
"""Steps timed with the host included; the GPU alone is timed for all of `--steps`."""


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES["tiny" if args.tiny else args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        bench = BenchRunner(shape, Path(scratch), args, max_num_tokens=2048)
        copy_bytes = 1 << 20 if args.tiny else common.COPY_BYTES
        bandwidth = common.copy_bytes_per_s(bench.device, copy_bytes)
        bases: dict[int, dict[str, float]] = {}
        rows = []
        for case in TINY_CASES if args.tiny else CASES:
            try:
                row = run_case(bench, case, bases, bandwidth, args)
            except DoesNotFit:
                print(f"does not fit into the arena: {case}", flush=True)
                continue
            print(row, flush=True)
            rows.append(row)
            # Written after each case: a run that is cut short leaves what it has.
            facts = {"shape": shape.name, "context": args.context, "steps": args.steps}
            results = {**facts, "copy_bytes_per_s": bandwidth, "rows": rows}
            name = f"gpu_decode_{shape.name}"
            path = common.write_results(name, bench.device, results, args.out)
    common.print_table(rows)
    print(f"wrote {path}")


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
    """Milliseconds of a step."""
    plan = bench.decode_plan(slots, args.context)
    times = {"step_ms": bench.step_s(plan, min(args.steps, MAX_HOST_STEPS)) * 1e3}
    if (graph_s := bench.graph_s(plan, args.steps)) is not None:
        times["gpu_ms"] = graph_s * 1e3
    return times


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=[n for n in SHAPES if n != "tiny"], default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=200)
    add_runner_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.context, args.steps, args.arena_bytes = 32, 3, 8 << 20
    return args


if __name__ == "__main__":
    main()
