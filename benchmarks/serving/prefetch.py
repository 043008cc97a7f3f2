"""Slots that are idle for copies of adapters, with prefetching and without, on a real engine.

    python -m benchmarks run serving.prefetch --work-dir DIR [--adapters 2000]

One engine process with the base and adapter files of `many_adapters` (made once), an arena that
holds a part of the adapters, and a batch of few slots. Requests, each for an adapter drawn at
random, arrive in an open loop at a share of the capacity, which is measured first. Rounds alternate
between loading the adapters of the next requests ahead and not. Prints medians over rounds: slot
seconds that were idle because an adapter was being copied, as a share of the round, mean first
token, and requests per second.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu_model import make_base
from benchmarks.machine import write_results
from benchmarks.serving.many_adapters import BATCH, RANKS, SMALL, Bench, make_adapter, make_bench
from loraplex.cli.output import print_table
from loraplex_services.worker.scheduling import lookahead
from loraplex_services.worker.types.messages import Command


def arrivals(bench: Bench, rate_per_s: float, num_requests: int) -> Iterator[float]:
    """When requests come, in seconds from the start; all at once for an infinite rate."""
    at_s = 0.0
    for _ in range(num_requests):
        at_s += bench.order.expovariate(rate_per_s) if rate_per_s else 0.0
        yield at_s


def measured(bench: Bench, rate_per_s: float, args: argparse.Namespace) -> dict[str, float]:
    """One open loop."""
    due = list(arrivals(bench, rate_per_s, args.requests))
    came_s: dict[str, float] = {}
    waits_s: dict[str, float] = {}
    scheduler, num_copies, idle_s = bench.engine.scheduler, 0, 0.0
    gc.collect()
    begin_s = last_s = time.perf_counter()
    while due or bench.engine.has_requests:
        commands: list[Command] = []
        now_s = time.perf_counter()
        while due and begin_s + due[0] <= now_s:
            adapter = bench.order.randrange(args.adapters)
            request = bench.request(adapter, args.tokens)
            commands += [bench.fetched(adapter), request]
            came_s[request.request.request_id] = begin_s + due.pop(0)
        output = bench.step(commands)
        now_s = time.perf_counter()
        for token in output.tokens:
            waits_s.setdefault(token.request_id, now_s - came_s[token.request_id])
        num_copies += len(output.copies_s)
        num_free = 1 if scheduler.is_full else BATCH - scheduler.num_running
        idle_s += min(num_free, scheduler.num_awaiting_copies) * (now_s - last_s)
        last_s = now_s
    return {
        "idle_share": idle_s / (BATCH * (last_s - begin_s)),
        "first_token_ms": statistics.fmean(waits_s.values()) * 1e3,
        "requests_per_s": args.requests / (last_s - begin_s),
        "copies_per_request": num_copies / args.requests,
    }


def main() -> None:
    """Print the table and write `results/<machine>/prefetch_measured.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=400, help="in a round")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--share", type=float, default=1.0, help="of the capacity that arrives")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arena-bytes", type=int, default=64 << 20)
    args = parser.parse_args()
    base = make_base(SMALL, args.work_dir)
    folders = [
        make_adapter(SMALL, args.work_dir / f"adapter-{i:04d}", RANKS[i % 4], seed=i)
        for i in range(args.adapters)
    ]
    bench = make_bench(base, folders, args.arena_bytes)
    per_s = measured(bench, 0.0, args)["requests_per_s"]
    print(f"capacity {per_s:.0f} requests/s")
    ahead = lookahead.NUM_REQUESTS
    runs: dict[int, list[dict[str, float]]] = {0: [], ahead: []}
    for _ in range(args.rounds):
        for num_requests, found in runs.items():
            lookahead.NUM_REQUESTS = num_requests
            found.append(measured(bench, args.share * per_s, args))
    results: list[dict[str, Any]] = []
    for num_requests, found in runs.items():
        medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
        results.append({"lookahead": num_requests, **medians})
    rows = [[f"{value:.4g}" for value in result.values()] for result in results]
    print_table(("K", "IDLE OF SLOTS", "FIRST TOKEN (ms)", "REQ/S", "COPIES / REQUEST"), rows)
    summary = {"capacity_per_s": per_s, "share": args.share, "runs": results}
    print(f"wrote {write_results('prefetch_measured', summary)}")


if __name__ == "__main__":
    main()
