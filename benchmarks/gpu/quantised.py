"""Decode steps and prompts on a GPU over a quantised base, compared with the same base in bfloat16.

    python -m benchmarks run gpu.quantised [--schemes fp8,int8,int4] [--device cpu --tiny]

Random weights, a context of 1k, one token a step, graphs on; adapters of rank 16 on all linears.
`gpu_ms` is the captured part of a step alone, `step_ms` one engine step with sampling, host
included. `faster` is the time of the base in bfloat16 over it; one process measures both. Every
step is compared with an eager one before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench_runner import BenchRunner, parse, runner_parser, spread
from benchmarks.gpu.checks import check_step
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import ALL_SEVEN, Shape
from loraplex_services.worker.types.step_plan import StepPlan

RANK = 16
DECODES = ((64, 0), (64, 64), (1, 0), (1, 1), (8, 0), (8, 8), (256, 0), (256, 64))
"""(sequences, adapters)."""
PROMPTS = (512, 2048, 8192)
TINY_DECODES, TINY_PROMPTS = ((2, 0), (2, 2)), (24,)
BASELINE = "none"


def main() -> int:
    """Measure, print, write after every step; returns how many settings failed."""
    args = parse_args()
    shape, device = SHAPES[args.shape], torch.device(args.device)
    facts = {"shape": shape.name, "context": args.context}
    results = Results(f"quantised_{shape.name}", args, **facts)
    base: dict[str, dict[str, float]] = {}
    for scheme in (BASELINE, *args.schemes.split(",")):
        with tempfile.TemporaryDirectory() as scratch, results.setting(scheme):
            measure_scheme(shape, Path(scratch), scheme, base, results, args)
        gc.unfreeze()  # a runner freezes what it is made of
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results.end()


def measure_scheme(
    shape: Shape,
    scratch: Path,
    scheme: str,
    base: dict[str, dict[str, float]],
    results: Results,
    args: argparse.Namespace,
) -> None:
    """Time all steps over one base. Mutates: base, which the baseline fills, and results."""
    decodes, prompts = (
        (TINY_DECODES, TINY_PROMPTS) if args.tiny else (DECODES, PROMPTS[: args.prompts])
    )
    longest = max(prompts, default=args.context)
    bench = BenchRunner(
        shape,
        scratch,
        args,
        max_num_tokens=min(longest, 2048),
        max_resident=64,
        max_model_len=longest,
        quantization=scheme,
    )
    plans: list[tuple[str, int, Any]] = [
        (f"decode {size}, {adapters} adapters", adapters, (size, adapters))
        for size, adapters in decodes
    ]
    plans += [(f"prompt {num_tokens}", 0, num_tokens) for num_tokens in prompts]
    for name, num_adapters, what in plans:
        times: dict[str, float] = {}
        with results.setting(f"{scheme}: {name}"):
            bench.clear()
            bench.load([RANK] * num_adapters, ALL_SEVEN)
            if isinstance(what, tuple):
                times = decode_times(bench, bench.decode_plan(spread(*what), args.context), args)
            else:
                times = {"step_ms": prompt_ms(bench, what, args)}
        if not times:
            continue
        if scheme == BASELINE:
            base[name] = times
        faster = {f"faster_{kind}": ms / times[kind] for kind, ms in base.get(name, {}).items()}
        results.add("rows", {"scheme": scheme, "step": name, **times, **faster})


def decode_times(bench: BenchRunner, plan: StepPlan, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step, once it equals a reference. Raises WrongResult."""
    check_step(bench, plan)
    times = {}
    if (graph_s := bench.graph_s(plan, args.steps)) is not None:
        times["gpu_ms"] = graph_s * 1e3
    return times | {"step_ms": bench.step_s(plan, min(args.steps, 30)) * 1e3}


def prompt_ms(bench: BenchRunner, num_tokens: int, args: argparse.Namespace) -> float:
    """Milliseconds of a prompt, host included, in chunks of the largest step."""
    plans = bench.chunk_plans(num_tokens, min(num_tokens, 2048), None)
    return sum(bench.step_s(plan, min(args.steps, 10)) for plan in plans) * 1e3


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--schemes", default="fp8,int8,int4")
    parser.add_argument(
        "--prompts", type=int, default=len(PROMPTS), help="how many of the lengths to time (all)"
    )
    parser.add_argument("--steps", type=int, default=100)
    return parse(parser, context=32, steps=3, arena_bytes=8 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
