"""Cost of sampling on a CPU: sampled steps relative to greedy steps, compiled code to torch.

    python -m benchmarks run cpu.sampling --work-dir DIR [--model 135m] [--rows 1,8,32]

Random weights make flat logits, so any token could win: the worst case for a draw. Steps are of the
engine in process, and kinds alternate. Operators are timed on the same logits one after another.
Prints ratios and writes `results/<machine>/cpu_sampling.json`.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import SHAPES, Shape, dtype_of, engine_options, make_base, make_prompts
from benchmarks.machine import write_results
from benchmarks.measuring import median_ratio, timed
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.sampling.drawing import TORCH_DRAWS, DrawOperators, first_argmax
from loraplex_services.worker.sampling.masks import limits_of

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape, rows = SHAPES[args.model], [int(count) for count in args.rows.split(",")]
    results = {
        "steps": steps(shape, rows, args),
        "draws": {str(n): draws(n, shape.vocab_size, args.repetitions) for n in rows},
    }
    write_results("cpu_sampling", results, args)


def parse_args() -> Namespace:
    """Options."""
    parser = engine_options(__doc__, repetitions=5, new_tokens=48)
    parser.add_argument("--rows", default="1,8,32", help="requests at once")
    return parser.parse_args()


def steps(shape: Shape, rows: list[int], args: Namespace) -> dict[str, Any]:
    """Seconds of a decode step by rows and kind, and each kind relative to greedy."""
    base = make_base(shape, args.work_dir)
    engine = OurEngine(base, dtype_of(), "auto", 1_000_000_000)
    measured: dict[str, Any] = {}
    for count in rows:
        step_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repetition in range(args.repetitions + 1):  # the first warms up
            prompts = make_prompts(count, shape.vocab_size, seed=100 * count + repetition)
            for kind, sampling in KINDS.items():
                run = engine.run(prompts, 0, args.new_tokens, **sampling)
                step_s[kind] += [run.step_s] if repetition else []
        ratios = {kind: median_ratio(step_s[kind], step_s["greedy"]) for kind in KINDS}
        measured[str(count)] = {"over_greedy": ratios, "step_s": step_s}
        for kind, ratio in ratios.items():
            median_ms = statistics.median(step_s[kind]) * 1e3
            print(f"{count} rows, {kind}: step {median_ms:.1f} ms, {ratio:.2f} of greedy")
    return measured


def draws(num_rows: int, vocab_size: int, repetitions: int) -> dict[str, Any]:
    """Compiled truncation and draw relative to torch's, on the same logits."""
    native = load_native()
    if native is None:
        return {}
    native.set_threads(torch.get_num_threads())
    ways = {
        "torch": TORCH_DRAWS,
        "compiled": DrawOperators(native.truncate, native.draw, first_argmax),
    }
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    keys = torch.stack([torch.arange(num_rows)] * 3, dim=1)
    ratios = {}
    for kind, sampling in KINDS.items():
        if not sampling:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions):
            drawn = {}
            for name, way in ways.items():
                with timed() as elapsed:
                    drawn[name] = choose(logits / sampling["temperature"], sampling, keys, way)
                seconds[name] += elapsed
            assert drawn["torch"].equal(drawn["compiled"]), "a draw differs"
        ratios[kind] = median_ratio(seconds["torch"], seconds["compiled"])
        print(f"{num_rows} rows, {kind}: torch takes {ratios[kind]:.0f} times the compiled draw")
    return ratios


def choose(scores: Tensor, sampling: dict[str, Any], keys: Tensor, way: DrawOperators) -> Tensor:
    """Truncate and draw. Mutates: scores."""
    params = SamplingParams(max_tokens=1, seed=0, **sampling)
    limits = limits_of([params] * len(scores), scores.shape[-1])
    if limits is not None:
        way.truncate(scores, torch.from_numpy(limits))
    return way.draw(scores, keys, 0)


if __name__ == "__main__":
    main()
