"""Prefill on a GPU: share of the base (the same engine and prompts without adapters).

    python -m benchmarks.gpu.prefill [--shape llama-3-8b] [--device cpu --tiny]

Whole prompts in one step, no cache hits, nothing captured; longer prompts run in chunks of 8,192
tokens, and their time is the sum. The last case has generations alongside the prompt, as chunked
prefill has. Every case is compared with a reference before it is timed (see `checks`).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench_runner import BenchRunner, parse, runner_parser, spread
from benchmarks.gpu.checks import check_step
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import ALL_SEVEN, ATTENTION
from loraplex_services.worker.types.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one length, the adapters they share, and generations alongside them."""

    num_prompts: int
    prompt_tokens: int
    num_adapters: int
    rank: int
    targets: tuple[str, ...]
    num_generations: int = 0


CASES = (
    Case(1, 2048, 1, 16, ALL_SEVEN),
    Case(1, 2048, 1, 64, ALL_SEVEN),
    Case(1, 2048, 1, 16, ATTENTION),
    Case(32, 256, 32, 16, ALL_SEVEN),
    Case(256, 32, 256, 16, ATTENTION),
    Case(1, 512, 33, 16, ALL_SEVEN, num_generations=32),
    Case(8, 512, 8, 16, ALL_SEVEN),
    Case(1, 512, 1, 16, ATTENTION),
    Case(1, 8192, 1, 16, ALL_SEVEN),
    Case(1, 32768, 1, 16, ALL_SEVEN),
)
"""The most important cases come first, because a run may be cut short."""
LONG_REPETITIONS = 3
"""Repetitions of prompts that take seconds."""
TINY_CASES = (
    Case(2, 20, 2, 8, ALL_SEVEN),
    Case(1, 130, 1, 8, ATTENTION),
    Case(1, 20, 3, 4, ATTENTION, num_generations=2),
)


def main() -> int:
    """Measure, print, write; returns how many cases failed."""
    args = parse_args()
    shape = SHAPES[args.shape]
    cases = TINY_CASES if args.tiny else CASES
    longest = max(case.prompt_tokens for case in cases)
    results = Results(f"prefill_{shape.name}", args, shape=shape.name)
    with tempfile.TemporaryDirectory() as scratch:
        bench = BenchRunner(
            shape, Path(scratch), args, args.step_tokens, max_model_len=longest + 1024
        )
        for case in cases:
            with results.setting(str(case)):
                results.add("rows", run_case(bench, case, args))
    return results.end()


def run_case(bench: BenchRunner, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. Raises DoesNotFit and WrongResult."""
    times = []
    repetitions = min(args.steps, LONG_REPETITIONS if case.prompt_tokens > 8192 else args.steps)
    for num_adapters in (0, case.num_adapters):
        bench.clear()
        bench.load([case.rank] * num_adapters, case.targets)
        plans = plans_of(bench, case, num_adapters, args)
        check_step(bench, plans[-1])
        times.append(sum(bench.step_s(plan, repetitions) for plan in plans))
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


def plans_of(
    bench: BenchRunner, case: Case, num_adapters: int, args: argparse.Namespace
) -> list[StepPlan]:
    """The steps of a case: prompts, then generations, each dealt its part of the adapters; or one
    prompt in chunks."""
    if case.prompt_tokens > args.step_tokens:
        slot = 0 if num_adapters else None
        return bench.chunk_plans(case.prompt_tokens, args.step_tokens, slot)
    num_rows = case.num_prompts + case.num_generations
    slots = spread(num_rows, num_adapters)
    lens = [case.prompt_tokens] * case.num_prompts
    prompts = bench.prefill_plan(lens, slots[: case.num_prompts])
    generations = bench.decode_plan(slots[case.num_prompts :], args.context)
    return [StepPlan(0, (*prompts.rows, *generations.rows))]


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-tokens", type=int, default=8192, help="most of one step (8192)")
    return parse(parser, context=32, steps=2, arena_bytes=8 << 20, step_tokens=64)


if __name__ == "__main__":
    raise SystemExit(main())
