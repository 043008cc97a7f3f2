"""An engine on a GPU without its API server: overlap, first tokens, and thousands of adapters.

    python -m benchmarks.gpu.engine [--shape llama-3-8b] [--adapters 2000] [--device cpu --tiny]

Random weights, rank 16 on every linear. The adapters are folders of their own whose files are links
to one adapter's, packed once: an engine cannot tell, and 2,000 files of 84 MB would not fit into
the page cache that stands for the disk here.

`overlap` holds tokens a second with steps one by one and overlapped, for the base and for 64
resident adapters. `counts` holds, for n adapters that requests choose from evenly, tokens a second
with all loads, relative to n = 0, and the ratio that the bytes of the steps predict. `first_token`
holds the first token of a request whose adapter is not on the device (`disk`, or `host` where it is
in pinned memory) over that of one whose adapter is, alongside 8 that decode.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench_runner import free_arena_bytes, parse, runner_parser
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import Shape, write_adapter, write_base_config
from benchmarks.serving.many_adapters import Bench, Counting, digest_of
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.messages import Cancel, EngineConfig, Prefetch, UnloadAdapter

MAX_RUNNING = 64
RESIDENT = 64
HOST_CACHE_BYTES = 8 << 30
"""Pinned host memory: 95 of these adapters of an 8B base."""
COUNTS = (1, 64, 500, 2000)
NUM_ROUNDS = 3


def main() -> int:
    """Measure, print, write after every row; returns how many parts failed."""
    args = parse_args()
    shape = SHAPES[args.shape]
    facts = {"shape": shape.name, "adapters": args.adapters, "rank": args.rank}
    results = Results(f"engine_{shape.name}", args, **facts)
    with tempfile.TemporaryDirectory() as scratch:
        bench = make_bench(shape, Path(scratch), args)
        results.note(arena_bytes=bench.runner.arena.data.nbytes)
        for part, measure in (
            ("overlap", compare_overlap),
            ("first_token", compare_tiers),
            ("counts", compare_counts),
        ):
            with results.setting(part):
                for row in measure(bench, args):
                    results.add(part, row)
    return results.end()


def make_bench(shape: Shape, root: Path, args: argparse.Namespace) -> Bench:
    """An engine with dummy weights and the folders of all adapters."""
    base = write_base_config(shape, root / "base", 4096)
    arena_bytes = args.arena_bytes or free_arena_bytes(shape)
    settings: dict[str, Any] = {"max_lora_rank": args.rank, "max_resident": 4096}
    settings["host_cache_bytes"] = HOST_CACHE_BYTES
    runner = build_runner(
        base,
        device=args.device,
        dtype=args.dtype,
        arena_bytes=arena_bytes,
        load_format="dummy",
        overlap="on",
        **settings,
    )
    runner.arena.data.zero_()
    runner.__class__ = Counting
    assert isinstance(runner, Counting)
    runner.steps, runner.slot_bytes = [], {}
    config = EngineConfig(
        model_dir=str(base),
        device=args.device,
        dtype=args.dtype,
        arena_bytes=arena_bytes,
        max_num_batched_tokens=2048,
        max_num_seqs=args.running,
        prefix_cache=False,
        **settings,
    )
    engine = Engine(runner, config, time.monotonic)
    folders, num_blocks = linked_adapters(runner, shape, root, args)
    return Bench(runner, engine, folders, num_blocks, shape=shape, max_rank=args.rank)


def linked_adapters(
    runner: Counting, shape: Shape, root: Path, args: argparse.Namespace
) -> tuple[list[Path], list[int]]:
    """Folders of all adapters, and the blocks of each: links to one that is packed."""
    dtype = getattr(torch, runner.model_info().dtype)
    first = write_adapter(shape, root / "adapter", args.rank, dtype, seed=args.rank)
    num_blocks = runner.pack_adapter(first).result()
    folders = []
    for i in range(args.adapters):
        folder = root / f"adapter-{i}"
        folder.mkdir()
        for file in first.iterdir():
            os.link(file, folder / file.name)
        folders.append(folder)
    return folders, [num_blocks] * args.adapters


def compare_overlap(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens a second with steps one by one and overlapped, alternately."""
    for num_adapters in (0, min(RESIDENT, args.adapters // 2)):
        make_resident(bench, num_adapters)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            for overlaps, found in rates.items():
                bench.runner._order.overlaps = overlaps
                result = bench.throughput(num_adapters, args.running, args.tokens)
                found.append(result["tokens_per_s"])
        off, on = (sorted(found)[NUM_ROUNDS // 2] for found in rates.values())
        row = {"adapters": num_adapters, "tokens_per_s_off": off, "tokens_per_s_on": on}
        yield row | {"on_over_off": on / off}


def make_resident(bench: Bench, num_adapters: int) -> None:
    """Load the first adapters, one after the other."""
    for adapter in range(num_adapters):
        bench.step([bench.fetched(adapter), Prefetch(digest_of(adapter), pin=False)])
        bench.runner.await_copies(5.0)
    bench.step()


def compare_tiers(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Medians alongside 8 requests that decode: of adapters on the device, of adapters that have
    just been evicted from it (their image is in pinned memory), and of adapters that no request has
    used yet."""
    num_resident = min(RESIDENT, args.adapters // 2)
    make_resident(bench, num_resident)
    running = [bench.request(None, 2000) for _ in range(8)]
    for submit in running:
        bench.step([submit])
    times: dict[str, list[float]] = {"resident": [], "host": [], "disk": []}
    for probe in range(min(args.probes, args.adapters - num_resident)):
        resident, other = bench.order.randrange(num_resident), num_resident + probe
        assert bench.is_resident(resident) and not bench.is_resident(other)
        times["resident"].append(bench.first_token_s(resident))
        times["disk"].append(bench.first_token_s(other))
        bench.step([UnloadAdapter(digest_of(other))])
        if not bench.is_resident(other):
            times["host"].append(bench.first_token_s(other))
    bench.step([Cancel(submit.request.request_id) for submit in running])
    found = {f"{tier}_ms": statistics.median(s) * 1e3 for tier, s in times.items() if s}
    for tier in ("host", "disk"):
        if f"{tier}_ms" in found:
            found[f"{tier}_over_resident"] = found[f"{tier}_ms"] / found["resident_ms"]
    yield found


def compare_counts(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every n compared with n = 0."""
    bench.drain()
    bench.throughput(0, args.running, 4)
    alone = bench.throughput(0, args.requests, args.tokens)["tokens_per_s"]
    for count in sorted({n for n in COUNTS if n < args.adapters} | {args.adapters}):
        row = bench.throughput(count, args.requests, args.tokens)
        again = bench.throughput(0, args.requests, args.tokens)["tokens_per_s"]
        row["over_base"] = 2 * row["tokens_per_s"] / (alone + again)
        row["of_prediction"] = row["over_base"] / row["predicted"]
        alone = again
        yield row


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--running", type=int, default=MAX_RUNNING, help="requests of a step (64)")
    parser.add_argument("--requests", type=int, default=256, help="of each row of counts (256)")
    parser.add_argument("--tokens", type=int, default=64, help="of each request (64)")
    parser.add_argument("--probes", type=int, default=60, help="first tokens to time (60)")
    tiny = {"adapters": 12, "rank": 8, "running": 4, "requests": 8, "tokens": 4, "probes": 12}
    return parse(parser, **tiny, arena_bytes=8 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
