"""Latency of streams while long prompts run, for several target times of a step (`max_step_s`).

    python -m benchmarks run serving.long_prompts --work-dir DIR [--bounds 0,0.1,0.2,0.5]

Eight streams decode for eight adapters. For a ninth adapter, long prompts arrive, each after the
previous one has had its token and the streams a few more, and a short prompt follows each of them.
Printed for each bound (0 = none): the time between two tokens of a stream, the time from the
arrival of the long and of the short prompt to its first token, and all tokens computed per second,
prompts included. Figures are medians of short rounds in which every bound serves the same requests.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

import msgspec

from benchmarks.cpu_model import SHAPES, make_base
from benchmarks.machine import options_of, write_results
from benchmarks.measuring import median_ratio, timed
from benchmarks.serving.many_adapters import (
    SMALL,
    Bench,
    digest_of,
    make_adapter,
    make_bench,
    make_config,
)
from loraplex.cli.output import print_table
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.types.messages import Cancel, Submit, UnloadAdapter

NUM_STREAMS, PAUSE_STEPS = 8, 10
RANK = 8
FIGURES = ("gap_p50_s", "gap_p99_s", "gap_max_s", "long_first_s", "short_first_s", "tokens_per_s")


def measure(bench: Bench, max_step_s: float, num_prompts: int, num_prompt: int) -> list[float]:
    """A new engine over the same runner; its `FIGURES`."""
    config = msgspec.structs.replace(
        make_config(Path(), 0), max_num_batched_tokens=2048, max_step_s=max_step_s
    )
    bench.engine = Engine(bench.runner, config, time.monotonic)
    bench.order = random.Random(0)
    streams = [bench.request(adapter, 1500) for adapter in range(NUM_STREAMS)]
    bench.step([*(bench.fetched(adapter) for adapter in range(NUM_STREAMS + 1)), *streams])
    gaps_s: list[float] = []
    """Every step brings every stream a token."""
    firsts_s: list[list[float]] = []
    """The first tokens of the long prompt and of the short one."""
    for number in range(-1, num_prompts):  # one to warm up
        if number == 0:
            gaps_s, firsts_s = [], []
        pair = [bench.request(NUM_STREAMS, 1, num_prompt), bench.request(NUM_STREAMS, 1)]
        awaited = {submit.request.request_id: index for index, submit in enumerate(pair)}
        first_s = [0.0, 0.0]
        pause: list[list[Submit]] = [[] for _ in range(PAUSE_STEPS)]
        sent = len(gaps_s) + PAUSE_STEPS
        for commands in itertools.chain(pause, ([s] for s in pair), itertools.repeat([])):
            with timed() as elapsed:
                tokens = bench.step(commands).tokens
            gaps_s += elapsed
            for token in tokens:
                if (index := awaited.pop(token.request_id, None)) is not None:
                    first_s[index] = sum(gaps_s[sent:])
            if not awaited:
                break
        firsts_s.append(first_s)
    bench.step([Cancel(submit.request.request_id) for submit in streams])
    bench.step([UnloadAdapter(digest_of(adapter)) for adapter in range(NUM_STREAMS + 1)])
    num_tokens = num_prompts * num_prompt + NUM_STREAMS * len(gaps_s)
    p99 = statistics.quantiles(gaps_s, n=100)[-1]
    gaps = statistics.median(gaps_s), p99, max(gaps_s)
    firsts = (statistics.median(column) for column in zip(*firsts_s, strict=True))
    return [*gaps, *firsts, num_tokens / sum(gaps_s)]


def main() -> None:
    """Measure, print, write `results/<machine>/long_prompts_<base>.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--base", choices=[SMALL.name, *SHAPES], default="135m")
    parser.add_argument(
        "--bounds", default="0,0.1,0.2,0.5", help="target times in seconds; 0 (none) comes first"
    )
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of them in a round")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    shape = {SMALL.name: SMALL, **SHAPES}[args.base]
    folders = [
        make_adapter(shape, args.work_dir / f"{shape.name}-rank-{RANK}-{i:04d}", RANK, seed=i)
        for i in range(NUM_STREAMS + 1)
    ]
    bench = make_bench(make_base(shape, args.work_dir), folders, 1 << 30, "auto")
    bounds = [float(text) for text in args.bounds.split(",")]
    rounds = [
        [measure(bench, bound, args.prompts, args.prompt) for bound in bounds]
        for _ in range(args.rounds)
    ]
    runs = []
    for bound, *columns in zip(bounds, *rounds, strict=True):
        figures = [statistics.median(column) for column in zip(*columns, strict=True)]
        runs.append({"max_step_s": bound, **dict(zip(FIGURES, figures, strict=True))})
    rows = [[f"{value:.3f}" for value in run.values()] for run in runs]
    print_table(["BOUND", *(name.upper() for name in FIGURES)], rows)
    for index, run in enumerate(runs[1:], 1):
        pairs = [(each[index], each[0]) for each in rounds]
        for index, name in enumerate(FIGURES):
            over, under = (
                [figures[index] for figures in side] for side in zip(*pairs, strict=True)
            )
            run[f"{name}_over_unbound"] = median_ratio(over, under)
        ratios = [f"{name} {run[f'{name}_over_unbound']:.2f}" for name in FIGURES]
        print(f"{run['max_step_s']} s over no bound: {', '.join(ratios)}")
    write_results(f"long_prompts_{shape.name}", {"runs": runs}, args)


if __name__ == "__main__":
    main()
