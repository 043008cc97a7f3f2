"""Decode steps with a quantised KV cache, relative to one in the base's dtype, by context.

    python -m benchmarks run cpu.kv_dtypes --work-dir DIR [--model 135m] [--contexts 128,1024]

The engine in process, once for each type, in turns in one run: random weights in bfloat16, no
adapters, greedy, all requests at once with prompts of one length. Prints the step that decodes the
whole batch, its ratio, and that of the first tokens, medians over the repetitions. Writes
`results/<machine>/cpu_kv_dtypes.json`.
"""

from __future__ import annotations

import random

from benchmarks.cpu.sides import OurEngine, Run, alternated, median_ratio_of
from benchmarks.cpu_model import FIRST_ORDINARY_TOKEN, SHAPES, engine_options, make_base
from benchmarks.machine import write_results
from loraplex_services.worker.native.isa import choose_isa

DTYPES = ("auto", "int8", "fp8")


def main() -> None:
    """Measure, print, write."""
    parser = engine_options(__doc__, new_tokens=16)
    parser.add_argument("--contexts", default="128,1024", help="prompt tokens of a request")
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args()
    shape = SHAPES[args.model]
    base = make_base(shape, args.work_dir)
    sides = {
        # There is no limit, because on slow machines prompts would wait until the first requests
        # have ended.
        dtype: OurEngine(
            base, "bfloat16", "auto", 3_000_000_000, kv_cache_dtype=dtype, max_step_s=0.0
        )
        for dtype in DTYPES
    }
    results: dict[str, dict[str, list[Run]]] = {}
    for num_tokens in map(int, args.contexts.split(",")):

        def prompts_of(repetition: int, num_tokens: int = num_tokens) -> list[list[int]]:
            rng = random.Random(1000 * num_tokens + repetition)
            ids = range(FIRST_ORDINARY_TOKEN, shape.vocab_size)
            return [rng.choices(ids, k=num_tokens) for _ in range(args.requests)]

        runs = alternated(sides, prompts_of, 0, args.new_tokens, args.repetitions)
        results[str(num_tokens)] = runs
        report(num_tokens, runs)
    write_results("cpu_kv_dtypes", {"isa": choose_isa("auto"), "runs": results}, args)


def report(num_tokens: int, runs: dict[str, list[Run]]) -> None:
    """One line for each type: how many times as long a step and all work are over it."""
    for kept in DTYPES[1:]:
        step, step_cpu, cpu = (
            median_ratio_of(runs[kept], runs["auto"], field)
            for field in ("step_s", "step_cpu_s", "cpu_s")
        )
        print(
            f"{num_tokens} prompt tokens: {kept} over auto: step {step:.2f}, its processor time "
            f"{step_cpu:.2f}, that of all work {cpu:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
