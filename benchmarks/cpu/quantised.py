"""Decode steps on a quantised base, relative to the same base in bfloat16.

    python -m benchmarks run cpu.quantised --work-dir DIR [--model 500m] [--repetitions 3]
        [--schemes int8,int4,fp8,Q8_0,Q4_K_M] [--name cpu_quantised]

The engine in process, once in bfloat16 and once for each scheme, in turns in one run: quantised on
load, or with the types of tensors that llama.cpp gives a GGUF file of that name. Random weights;
adapters of ranks 8, 16, 32 and 64 on every linear; greedy; all requests at once. Prints how many
times faster the step that decodes the whole batch is, by wall time and by processor time, medians
over the repetitions of the median step. Writes `results/<machine>/<name>.json`.
"""

from __future__ import annotations

from functools import partial

from benchmarks.cpu.sides import OurEngine, Run, alternated, median
from benchmarks.cpu_model import (
    FILES,
    SHAPES,
    engine_options,
    make_adapter,
    make_base,
    make_gguf_folder,
    make_prompts,
)
from benchmarks.machine import write_results
from loraplex_services.worker.native.isa import choose_isa

PLAIN, SCHEMES = "none", "int8,int4,fp8"
CASES = "1x0,2x0,4x0,8x0,8x8,32x0,32x32"
"""Requests x distinct adapters."""
Runs = dict[str, list[Run]]
"""Runs by scheme."""


def main() -> None:
    """Measure, print, write."""
    parser = engine_options(__doc__, model="500m", new_tokens=48)
    parser.add_argument("--schemes", default=SCHEMES, help="--quantization, or Q8_0 and Q4_K_M")
    parser.add_argument("--cases", default=CASES, help="requests x adapters")
    parser.add_argument("--arena-bytes", type=int, default=1_500_000_000)
    parser.add_argument("--name", default="cpu_quantised", help="of the results file")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    base = make_base(shape, args.work_dir)
    num_adapters = max(adapters for _, adapters in cases)
    folders = [make_adapter(shape, args.work_dir, i) for i in range(num_adapters)]
    sides = {}
    for scheme in (PLAIN, *args.schemes.split(",")):
        published = scheme in FILES
        folder = make_gguf_folder(base, scheme, args.work_dir) if published else base
        on_load = PLAIN if published else scheme
        sides[scheme] = OurEngine(
            folder, "bfloat16", "auto", args.arena_bytes, quantization=on_load
        )
        sides[scheme].load(folders)
    results = {}
    for count, adapters in cases:
        prompts_of = partial(seeded_prompts, count, shape.vocab_size)
        amounts = args.new_tokens, args.repetitions
        runs = alternated(sides, prompts_of, adapters, *amounts)
        results[f"{count}x{adapters}"] = runs
        report(f"{count}x{adapters}", runs)
    write_results(args.name, {"isa": choose_isa("auto"), "runs": results}, args)


def seeded_prompts(count: int, vocab_size: int, repetition: int) -> list[list[int]]:
    """The prompts of one repetition of a case."""
    return make_prompts(count, vocab_size, seed=1000 * count + repetition)


def report(case: str, runs: Runs) -> None:
    """One line: milliseconds of a step in bfloat16, and how many times faster the others are."""
    plain_ms = median(runs[PLAIN], "step_s") * 1e3
    parts = [f"{case}: bfloat16 {plain_ms:.1f} ms"]
    for scheme in [scheme for scheme in runs if scheme != PLAIN]:
        wall, cpu = (
            median(runs[PLAIN], field) / median(runs[scheme], field)
            for field in ("step_s", "step_cpu_s")
        )
        parts.append(f"{scheme} {wall:.2f}x ({cpu:.2f}x of processor time)")
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
