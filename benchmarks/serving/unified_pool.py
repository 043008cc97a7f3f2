"""Measured: one pool for KV cache and adapters, compared with fixed splits, on a real engine.

    OMP_NUM_THREADS=1 python -m benchmarks run serving.unified_pool --work-dir DIR [--ranks 1,2,4,8]
        [--base 135m] [--dtype auto] [--blocks 128]

A real engine (random base, 400 real adapter files on every linear) has so little memory that the
batch is what fits. All requests wait from the start, first come, first served. The load drifts
between many adapters with short answers and one adapter with long answers. Printed for one pool,
for each share of the blocks reserved for adapters, and for S-LoRA's split
(`scheduling.unified_pool`): tokens per step, which other work on the machine hardly changes, and
tokens per second of the process's processor time. Figures are medians of rounds in which all serve
the same requests. A share that cannot hold the largest adapter serves nothing.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu_model import SHAPES, make_base
from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.unified_pool import Split, engine_kind, over_splits, rounded, splits_of
from benchmarks.serving.many_adapters import (
    SMALL,
    Bench,
    digest_of,
    make_adapter,
    make_bench,
    make_config,
)
from loraplex.cli.output import print_table
from loraplex_services.worker.types.extents import count_most_blocks, count_pages_per_block
from loraplex_services.worker.types.messages import Command, UnloadAdapter

NUM_ADAPTERS = 400
MANY, FEW = (144, 8, 12), (12, 96, 96)
"""Requests of a phase, tokens of their prompts and of their answers."""
NUM_PHASES = 4
MAX_RUNNING = 48


def drifting(bench: Bench) -> tuple[list[Command], int]:
    """All requests, and how many tokens they generate."""
    commands: list[Command] = []
    num_tokens = 0
    for phase in range(NUM_PHASES):
        num_requests, num_prompt, num_output = (MANY, FEW)[phase % 2]
        for _ in range(num_requests):
            adapter = bench.order.randrange(NUM_ADAPTERS) if not phase % 2 else phase
            commands += [
                bench.fetched(adapter),
                bench.request(adapter, num_output, num_prompt),
            ]
            num_tokens += num_output
    return commands, num_tokens


def measure(bench: Bench, split: Split | None, num_blocks: int, seed: int) -> tuple[float, float]:
    """A new engine over the same runner; the trace from its first request to its last token.

    Returns tokens a step and tokens a second of processor time.
    """
    size = count_pages_per_block(bench.runner.block_bytes)
    most_blocks = max(count_most_blocks(num_pages, size) for num_pages in bench.num_pages)
    if split is not None and int(split.share * num_blocks) < most_blocks:
        return 0.0, 0.0
    config = msgspec.structs.replace(make_config(Path(), 0), max_num_seqs=MAX_RUNNING)
    bench.runner.arena_blocks = num_blocks
    bench.engine = engine_kind(split)(bench.runner, config, time.monotonic)
    bench.order = random.Random(seed)
    commands, num_tokens = drifting(bench)
    bench.runner.steps.clear()
    gc.collect()
    begin_s = time.process_time()
    num_made = len(bench.step(commands).tokens)
    while bench.engine.has_requests:
        num_made += len(bench.step().tokens)
    elapsed_s = time.process_time() - begin_s
    assert num_made == num_tokens, "requests were refused"
    bench.step([UnloadAdapter(digest_of(adapter)) for adapter in range(NUM_ADAPTERS)])
    return num_tokens / len(bench.runner.steps), num_tokens / elapsed_s


def main() -> None:
    """Measure, print, write `results/<machine>/unified_pool_measured_<ranks>_<blocks>.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--shares", default="5,10,20,30,50")
    parser.add_argument("--ranks", default="8", help="dealt to the adapters (8)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--base", choices=[SMALL.name, *SHAPES], default=SMALL.name)
    parser.add_argument("--dtype", default="float32", help="the engine computes in (float32)")
    args = parser.parse_args()
    ranks = [int(text) for text in args.ranks.split(",")]
    shape = {SMALL.name: SMALL, **SHAPES}[args.base]
    base = make_base(shape, args.work_dir)
    dealt = [ranks[i % len(ranks)] for i in range(NUM_ADAPTERS)]
    folders = [
        make_adapter(shape, args.work_dir / f"{shape.name}-rank-{rank}-{i:04d}", rank, seed=i)
        for i, rank in enumerate(dealt)
    ]
    bench = make_bench(base, folders, 512 << 20, args.dtype)
    kinds = [None, *splits_of(args.shares)]
    measure(bench, None, args.blocks, -1)  # warm-up
    rounds = [
        [measure(bench, kind, args.blocks, seed) for kind in kinds] for seed in range(args.rounds)
    ]
    runs = [
        {
            "memory": kind.name if kind else "one pool",
            "tokens_a_step": statistics.median(each[index][0] for each in rounds),
            "tokens_per_s": statistics.median(each[index][1] for each in rounds),
        }
        for index, kind in enumerate(kinds)
    ]
    rows = [[r["memory"], f"{r['tokens_a_step']:.2f}", f"{r['tokens_per_s']:.0f}"] for r in runs]
    print_table(["MEMORY", "TOKENS/STEP", "TOKENS/S"], rows)
    results: dict[str, Any] = {"block_bytes": bench.runner.block_bytes, "runs": runs}
    for figure in ("tokens_a_step", "tokens_per_s"):
        ratios = over_splits([run[figure] for run in runs])
        print(f"one pool over the others, {figure}: {rounded(ratios)}")
        results[figure] = ratios
    name = f"unified_pool_measured_{shape.name}_{args.ranks.replace(',', '_')}_{args.blocks}"
    write_results(name, results, args)


if __name__ == "__main__":
    main()
