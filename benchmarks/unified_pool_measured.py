"""Measured: one pool for KV cache and adapters beside fixed splits, an engine on this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.unified_pool_measured --work-dir DIR [--shares 10,30]

A real engine (22M parameters, 400 real adapter files of ranks 1 to 8) with so little memory that
its batch is what fits. All requests wait from the start, first come, first served, and the load
drifts: many adapters with short answers, then one adapter with long ones, and again. Printed:
tokens for each second of the process's processor time (which other work on the machine disturbs
little) with one pool, with each share of the blocks kept for adapters, and with S-LoRA's split;
each the median of turns in which all take part.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu_model import make_base
from benchmarks.machine import write_results
from benchmarks.many_adapters import (
    RANKS,
    SMALL,
    Bench,
    digest_of,
    make_adapter,
    make_bench,
    make_config,
)
from benchmarks.unified_pool import SLORA_SHARE, SplitEngine
from loraplex.cli.output import print_table
from services.worker.engine import Engine
from services.worker.messages import Command, Unload

NUM_ADAPTERS = 400
MANY, FEW = (288, 8, 12), (24, 96, 96)
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
            submit = bench.request(adapter, num_output)
            prompt = [bench.order.randrange(300, SMALL.vocab_size) for _ in range(num_prompt)]
            commands += [
                bench.fetched(adapter),
                msgspec.structs.replace(submit, prompt_ids=prompt),
            ]
            num_tokens += num_output
    return commands, num_tokens


def tokens_per_s(bench: Bench, share: float | None, arena_blocks: int) -> float:
    """A new engine over the same runner; the trace from its first request to its last token."""
    bench.runner.arena_blocks = arena_blocks
    config = msgspec.structs.replace(make_config(Path(), 0), max_running=MAX_RUNNING)
    SplitEngine.share = share or 0.0
    kind = Engine if share is None else SplitEngine
    bench.engine = kind(bench.runner, config, time.monotonic)
    bench.runner.arena_blocks = arena_blocks
    commands, num_tokens = drifting(bench)
    gc.collect()
    begin_s = time.process_time()
    bench.step(commands)
    bench.drain()
    elapsed_s = time.process_time() - begin_s
    bench.step([Unload(digest_of(adapter)) for adapter in range(NUM_ADAPTERS)])
    return num_tokens / elapsed_s


def main() -> None:
    """Measure, print, write `results/<machine>/unified_pool_measured.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--shares", default="5,10,20,30,50")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=96)
    args = parser.parse_args()
    base = make_base(SMALL, args.work_dir)
    folders = [
        make_adapter(SMALL, args.work_dir / f"adapter-{i:04d}", RANKS[i % 4], seed=i)
        for i in range(NUM_ADAPTERS)
    ]
    bench = make_bench(base, folders, 512 << 20)
    shares = [None, *(int(text) / 100 for text in args.shares.split(",")), SLORA_SHARE]
    tokens_per_s(bench, None, args.blocks)  # warm-up
    turns = [[tokens_per_s(bench, s, args.blocks) for s in shares] for _ in range(args.turns)]
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    names = ["one pool", *(f"{s:.0%} for adapters" for s in shares[1:-1] if s), "S-LoRA's split"]
    print_table(
        ["MEMORY", "TOKENS/S"], [[n, f"{m:.0f}"] for n, m in zip(names, medians, strict=True)]
    )
    over_best = statistics.median(turn[0] / max(turn[1:-1]) for turn in turns)
    over_slora = statistics.median(turn[0] / turn[-1] for turn in turns)
    print(f"one pool over the best split {over_best:.2f}, over S-LoRA's {over_slora:.2f}")
    runs: list[dict[str, Any]] = [
        {"share": share, "tokens_per_s": median}
        for share, median in zip(shares, medians, strict=True)
    ]
    results = {"blocks": args.blocks, "block_bytes": bench.runner.block_bytes, "runs": runs}
    ratios = {"over_best": over_best, "over_slora": over_slora}
    print(f"wrote {write_results('unified_pool_measured', {**results, **ratios})}")


if __name__ == "__main__":
    main()
