"""Steps that verify drafts, relative to steps of one token: their cost and their gain.

    python -m benchmarks run cpu.speculation --work-dir DIR [--model 135m] [--requests 1,4,8]

The engine in process, twice, with drafts and without, in turns in one run; random weights in
bfloat16 and one adapter on every linear. Outputs are compared token for token. Of four kinds of
traffic, `cycle` is greedy: random weights soon repeat themselves. `again` asks what was asked
before, so that the adapter's earlier outputs are the best drafts there can be. `noise` is drawn
from 8 tokens: there is nearly always a draft, and 7 in 8 are wrong. `text` is drawn from all
tokens: drafts are rare. Prints the tokens of each request and step, and the time over that
without drafts.
Writes `results/<machine>/cpu_speculation.json`.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cpu.sides import OurEngine, Run, median_ratio_of
from benchmarks.cpu_model import SHAPES, engine_options, make_adapter, make_base, make_prompts
from benchmarks.machine import write_results
from benchmarks.measuring import median_ratio

TRAFFIC: dict[str, dict[str, Any]] = {
    "cycle": {},
    "again": {"temperature": 1.0},
    "noise": {"temperature": 1.0, "allowed_token_ids": tuple(range(400, 408))},
    "text": {"temperature": 1.0},
}
ARENA_BYTES = 600_000_000


def main() -> None:
    """Measure, print, write."""
    parser = engine_options(__doc__)
    parser.add_argument("--requests", default="1,4,8", help="at once")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    base, adapter = make_base(shape, args.work_dir), make_adapter(shape, args.work_dir, 1)
    sides = [OurEngine(base, "bfloat16", "auto", ARENA_BYTES, drafts=on) for on in (False, True)]
    for side in sides:
        side.load([adapter])
    results: dict[str, Any] = {"rows": rows(sides[0], shape.vocab_size, args.repetitions)}
    for num_requests in map(int, args.requests.split(",")):
        for kind, sampling in TRAFFIC.items():
            runs: tuple[list[Run], list[Run]] = ([], [])
            for repetition in range(args.repetitions + 1):  # the first warms up
                seed = 1000 if kind == "again" else repetition
                prompts = make_prompts(num_requests, shape.vocab_size, seed)
                outputs = []
                for side, own in zip(sides, runs, strict=True):
                    run = side.run(prompts, 1, args.new_tokens, seed=seed, **sampling)
                    outputs.append(side.outputs)
                    own += [run] if repetition else []
                assert outputs[0] == outputs[1], "drafts have changed an output"
            results[f"{num_requests} {kind}"] = compare(num_requests, kind, args.new_tokens, runs)
    write_results("cpu_speculation", results, args)


def rows(side: OurEngine, vocab_size: int, repetitions: int) -> dict[str, float]:
    """Processor time of a step of n rows with one adapter, over that of one row."""
    counts, seconds = (1, 2, 4, 8), dict[int, list[float]]()
    for repetition in range(repetitions + 1):
        prompts = make_prompts(1, vocab_size, seed=repetition)
        for count in counts:
            run = side.run(prompts * count, 1, 16)
            seconds.setdefault(count, []).extend([run.step_cpu_s] if repetition else [])
    ratios = {str(count): median_ratio(seconds[count], seconds[1]) for count in counts}
    print("a step of n rows over one of 1:", {n: round(ratio, 2) for n, ratio in ratios.items()})
    return ratios


def compare(
    num_requests: int, kind: str, num_tokens: int, runs: tuple[list[Run], list[Run]]
) -> dict[str, float]:
    """One line."""
    plain, drafted = runs
    facts = {
        "tokens_per_step": statistics.median(num_tokens / run.num_steps for run in drafted),
        "cpu": median_ratio_of(drafted, plain, "cpu_s"),
        "wall": median_ratio_of(drafted, plain, "wall_s"),
    }
    print(
        f"{num_requests} requests, {kind}: {facts['tokens_per_step']:.2f} tokens a step; with "
        f"drafts over without: processor time {facts['cpu']:.2f}, wall {facts['wall']:.2f}",
        flush=True,
    )
    return facts


if __name__ == "__main__":
    main()
