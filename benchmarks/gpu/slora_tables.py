"""Settings S1 to S4 of the S-LoRA paper: requests a second over the number of adapters, and what
its ablations cost here.

    python -m benchmarks.gpu.slora_tables [--settings s1,s2] [--device cpu --tiny]

Lengths are U[8, 512] in and out, so a request prefills 260 tokens and decodes 260 at a mean context
of 390; adapters are on q, k, v, o; rows choose them by a power law with exponent 1. A row of the
table is a steady state, put together from steps measured on the device, not a replayed trace:

    requests/s = batch / (260 * decode step + batch * prefill of one request)

with the largest batch, at most 256, whose KV cache and distinct adapters fit into the memory given.
`unified` has one shared pool. `split` reserves a quarter of the pool for adapters. `padded`
pads every adapter of a step to the largest rank and multiplies with batched products: their time is
measured and replaces that of our kernels. `merged` adds one adapter at a time to the weights, runs
its requests to the end and takes it out again, as PEFT does; that is measured on weights that lie
in no cache.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import common
from benchmarks.gpu.bench_runner import BenchRunner, parse, runner_parser
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import ATTENTION

IN_TOKENS, OUT_TOKENS, CONTEXT = 260, 260, 390
SPLIT_SHARE = 0.25
MAX_BATCH = 256
MERGED_WEIGHTS = 8
"""Used in rotation, so that none lies in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A base and the ranks that adapters take turns with."""

    shape: str
    ranks: tuple[int, ...]


SETTINGS = {
    "s1": Setting("llama-2-7b", (8,)),
    "s2": Setting("llama-2-7b", (64, 32, 16, 8)),
    "s3": Setting("llama-2-13b", (16,)),
    "s4": Setting("llama-2-13b", (64, 32, 16)),
}
NUM_ADAPTERS = (0, 5, 100, 1000, 2000)


def main() -> int:
    """Measure, print, write; returns how many settings failed."""
    args = parse_args()
    results = Results("slora_tables", args)
    names = args.settings.split(",")
    for shape_name in dict.fromkeys(SETTINGS[name].shape for name in names):
        shape = SHAPES["tiny" if args.tiny else shape_name]
        with tempfile.TemporaryDirectory() as scratch:
            bench = BenchRunner(shape, Path(scratch), args, 512 if args.tiny else 2048)
            for name in names:
                if SETTINGS[name].shape == shape_name:
                    with results.setting(name):
                        for row in run_setting(bench, name, args):
                            results.add("rows", row)
        del bench
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return results.end()


def run_setting(
    bench: BenchRunner, name: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each number of adapters."""
    base_per_s = None
    for num_adapters in (0, 2) if args.tiny else NUM_ADAPTERS:
        row = {"setting": name, "adapters": num_adapters}
        row |= run_case(bench, SETTINGS[name].ranks, num_adapters, args)
        base_per_s = base_per_s or row["unified_req_per_s"]
        row["share_of_no_adapters"] = row["unified_req_per_s"] / base_per_s
        yield row


def run_case(
    bench: BenchRunner, ranks: Sequence[int], num_adapters: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Requests a second with one pool, and with each ablation."""
    limit = 4 if args.tiny else MAX_BATCH
    chosen = choose_adapters(num_adapters, limit)
    pool = bench.runner.arena_blocks
    used = fitting_rows(bench, ranks, chosen, pool, None)
    decode_s, prefill_s = steps_s(bench, ranks, used, args)
    distinct = len({adapter for adapter in used if adapter is not None})
    row: dict[str, Any] = {"batch": len(used), "distinct": distinct}
    row |= {"decode_ms": decode_s * 1e3, "prefill_ms": prefill_s * 1e3}
    row["unified_req_per_s"] = rate(len(used), decode_s, prefill_s)
    if not num_adapters:
        return row
    adapter_pool = int(pool * SPLIT_SHARE)
    split = fitting_rows(bench, ranks, chosen, pool - adapter_pool, adapter_pool)
    row["split_batch"] = len(split)
    row["split_req_per_s"] = rate(len(split), *steps_s(bench, ranks, split, args))
    base_s, base_prefill_s = steps_s(bench, ranks, [None] * len(used), args)
    padded_s = padded_bmm_s(bench, ranks, used, args)
    row["padded_req_per_s"] = rate(len(used), base_s + padded_s, base_prefill_s)
    row["merged_req_per_s"] = merged_rate(bench, ranks, used, base_prefill_s, args)
    return row


def rate(batch: int, decode_s: float, prefill_s: float) -> float:
    """Requests a second of a steady batch."""
    return batch / (OUT_TOKENS * decode_s + batch * prefill_s)


def fitting_rows(
    bench: BenchRunner,
    ranks: Sequence[int],
    chosen: Sequence[int | None],
    pool: int,
    adapter_pool: int | None,
) -> list[int | None]:
    """As many of the rows as fit, in the order of a batch.

    Args:
        chosen: the adapter of each row.
        pool: blocks for caches.
        adapter_pool: blocks for adapters; None = they share `pool`.
    """
    kv_blocks = -(-(CONTEXT + 1) // bench.runner.tokens_per_block) * len(
        bench.runner.kv_group_windows
    )
    seen: set[int | None] = {None}
    num_rows = 0
    for adapter in chosen:
        new = 0
        if adapter is not None and adapter not in seen:
            new = adapter_blocks(bench, ranks[adapter % len(ranks)])
        if adapter_pool is None:
            pool -= new
        else:
            adapter_pool -= new
        pool -= kv_blocks
        if pool < 0 or (adapter_pool is not None and adapter_pool < 0):
            break
        seen.add(adapter)
        num_rows += 1
    return sorted(chosen[:num_rows], key=lambda a: -1 if a is None else a)


def choose_adapters(num_adapters: int, num_rows: int) -> list[int | None]:
    """The adapter of each row by a power law with exponent 1; None = base."""
    if not num_adapters:
        return [None] * num_rows
    weights = [1 / (i + 1) for i in range(num_adapters)]
    return list(random.Random(0).choices(range(num_adapters), weights, k=num_rows))


def adapter_blocks(bench: BenchRunner, rank: int) -> int:
    """Blocks of one adapter, by its bytes."""
    num_bytes = bench.itemsize * bench.shape.num_adapter_weights(rank, ATTENTION)
    return -(-num_bytes // bench.runner.block_bytes) + 1


def steps_s(
    bench: BenchRunner, ranks: Sequence[int], used: Sequence[int | None], args: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of a decode step of these rows, and of prefilling one request."""
    bench.clear()
    distinct = sorted({adapter for adapter in used if adapter is not None})
    bench.load([ranks[adapter % len(ranks)] for adapter in distinct], ATTENTION)
    slot_of = {adapter: slot for slot, adapter in enumerate(distinct)}
    slots = [None if adapter is None else slot_of[adapter] for adapter in used]
    decode_s = bench.step_s(bench.decode_plan(slots, CONTEXT), args.steps)
    # The prompt's cache lies where the generations' was: that step is over.
    bench.clear_caches()
    prefill_s = bench.step_s(bench.prefill_plan([IN_TOKENS], slots[:1]), args.steps)
    return decode_s, prefill_s


def padded_bmm_s(
    bench: BenchRunner, ranks: Sequence[int], used: Sequence[int | None], args: argparse.Namespace
) -> float:
    """Seconds of all layers' updates as gathered, padded batched products."""
    rank = max(ranks)
    dtype = torch.bfloat16 if bench.itemsize == 2 else torch.float32
    total_s = 0.0
    for name in ATTENTION:
        num_inputs, num_outputs = bench.shape.linears[name]
        shapes = (rank, num_inputs), (num_outputs, rank)
        distinct = len(set(used))
        a, b = (torch.zeros(distinct, *s, dtype=dtype, device=bench.device) for s in shapes)
        x = torch.zeros(len(used), num_inputs, 1, dtype=dtype, device=bench.device)
        y = torch.zeros(len(used), num_outputs, 1, dtype=dtype, device=bench.device)
        positions = {adapter: i for i, adapter in enumerate(sorted(set(used), key=str))}
        index = torch.tensor([positions[adapter] for adapter in used], device=bench.device)

        def run(a=a, b=b, x=x, y=y, index=index) -> None:  # type: ignore[no-untyped-def]
            y.baddbmm_(b[index], torch.bmm(a[index], x))

        run()
        total_s += common.median_s(run, bench.device, args.steps)
    return total_s * bench.shape.num_layers


def merged_rate(
    bench: BenchRunner,
    ranks: Sequence[int],
    used: Sequence[int | None],
    prefill_s: float,
    args: argparse.Namespace,
) -> float:
    """Requests a second when each adapter's rows run alone on merged weights."""
    bench.clear()
    merges_s = {rank: merge_time_s(bench, rank, args) for rank in set(ranks)}
    steps: dict[int, float] = {}
    total_s = 0.0
    for adapter, size in Counter(used).items():
        if size not in steps:
            bench.clear()
            plan = bench.decode_plan([None] * size, CONTEXT)
            steps[size] = bench.step_s(plan, args.steps)
        total_s += OUT_TOKENS * steps[size] + size * prefill_s
        if adapter is not None:
            total_s += 2 * merges_s[ranks[adapter % len(ranks)]]
    return len(used) / total_s


def merge_time_s(bench: BenchRunner, rank: int, args: argparse.Namespace) -> float:
    """Seconds of adding one adapter to the weights of all layers."""
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if bench.itemsize == 2 else torch.float32,
        "device": bench.device,
    }
    total_s = 0.0
    for name in ATTENTION:
        num_inputs, num_outputs = bench.shape.linears[name]
        count = 2 if args.tiny else MERGED_WEIGHTS
        weights = itertools.cycle(
            [torch.zeros(num_outputs, num_inputs, **options) for _ in range(count)]
        )
        b = torch.zeros(num_outputs, rank, **options)
        a = torch.zeros(rank, num_inputs, **options)

        def run(weights=weights, b=b, a=a) -> None:  # type: ignore[no-untyped-def]
            next(weights).addmm_(b, a)

        run()
        total_s += common.median_s(run, bench.device, args.steps)
    return total_s * bench.shape.num_layers


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--settings", default="s1,s2", help="of s1, s2, s3, s4, comma separated")
    parser.add_argument("--steps", type=int, default=20)
    parser.set_defaults(context=IN_TOKENS + OUT_TOKENS)
    args = parse(parser, settings="s2", steps=2, arena_bytes=16 << 20)
    if unknown := set(args.settings.split(",")) - set(SETTINGS):
        parser.error(f"--settings: unknown {', '.join(sorted(unknown))}; choose of s1, s2, s3, s4")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
