"""Prefill on a GPU: share of the base (the same engine and prompts without adapters).

    python -m benchmarks.gpu.prefill [--shape llama-3-8b] [--device cpu --tiny]

Whole prompts in one step, no cache hits, nothing captured; the last case has generations beside the
prompt, as chunked prefill has.
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
from services.worker.request import StepPlan


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one length, the adapters they share, and generations beside them."""

    num_prompts: int
    prompt_tokens: int
    num_adapters: int
    rank: int
    targets: tuple[str, ...]
    num_generations: int = 0


CASES = (
    Case(1, 512, 1, 16, ATTENTION),
    Case(1, 2048, 1, 16, ATTENTION),
    Case(1, 2048, 1, 16, ALL_SEVEN),
    Case(1, 2048, 1, 64, ALL_SEVEN),
    Case(8, 512, 8, 16, ALL_SEVEN),
    Case(32, 256, 32, 16, ALL_SEVEN),
    Case(1, 512, 33, 16, ALL_SEVEN, num_generations=32),
)
TINY_CASES = (Case(2, 20, 2, 8, ALL_SEVEN), Case(1, 20, 3, 4, ATTENTION, num_generations=2))


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES["tiny" if args.tiny else args.shape]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = BenchRunner(shape, Path(scratch), args, max_num_tokens=64 if args.tiny else 8192)
        for case in TINY_CASES if args.tiny else CASES:
            try:
                row = run_case(bench, case, args)
            except DoesNotFit:
                print(f"does not fit into the arena: {case}", flush=True)
                continue
            print(row, flush=True)
            rows.append(row)
            facts = {"shape": shape.name, "rows": rows}
            path = common.write_results(f"prefill_{shape.name}", bench.device, facts, args.out)
    common.print_table(rows)
    print(f"wrote {path}")


def run_case(bench: BenchRunner, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. Raises DoesNotFit."""
    times = []
    for num_adapters in (0, case.num_adapters):
        bench.clear()
        bench.load([case.rank] * num_adapters, case.targets)
        times.append(bench.step_s(plan_of(bench, case, num_adapters, args.context), args.steps))
    num_tokens = case.num_prompts * case.prompt_tokens
    return {
        "prompts": case.num_prompts,
        "tokens": num_tokens,
        "generations": case.num_generations,
        "adapters": case.num_adapters,
        "rank": case.rank,
        "modules": len(case.targets),
        "base_ms": times[0] * 1e3,
        "step_ms": times[1] * 1e3,
        "tokens_per_s": num_tokens / times[1],
        "share_of_base": times[0] / times[1],
    }


def plan_of(bench: BenchRunner, case: Case, num_adapters: int, context: int) -> StepPlan:
    """Prompts, then generations, each dealt its part of the adapters."""
    num_rows = case.num_prompts + case.num_generations
    slots = spread(num_rows, num_adapters)
    lens = [case.prompt_tokens] * case.num_prompts
    prompts = bench.prefill_plan(lens, slots[: case.num_prompts])
    generations = bench.decode_plan(slots[case.num_prompts :], context)
    return StepPlan(0, (*prompts.rows, *generations.rows))


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=[n for n in SHAPES if n != "tiny"], default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=10)
    add_runner_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.context, args.steps, args.arena_bytes = 32, 2, 8 << 20
    return args


if __name__ == "__main__":
    main()
