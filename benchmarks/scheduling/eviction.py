"""Adapter cache misses under each eviction order, on seeded traces.

    python -m benchmarks run scheduling.eviction [--seeds 5]

2,000 adapters of ranks 8 to 64 compete for an arena that holds a tenth of their blocks. Requests
arrive as a Poisson process and use their adapter for a while. Popularity follows Zipf's law, or
Zipf's law with drifting ranks (every minute, a tenth of the adapters swap ranks), or it jumps
(every two minutes, all ranks change). `AdapterCache`, `Arena` and `Reclaimer` are the worker's own;
time is virtual. Prints misses per request, and seconds of copies relative to those of least
recently used.
"""

from __future__ import annotations

import heapq
import random
import statistics
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.machine import options_of, write_results
from loraplex.cli.output import print_table
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.eviction import LeastExpectedLoss
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.types.residency import CachedAdapter

NUM_ADAPTERS, RANKS, RANKS_PER_BLOCK = 2000, (64, 32, 16, 8), 4
RATE_PER_S, DURATION_S, HOLD_S = 20.0, 900.0, 4.0
COPY_START_S, COPY_S_PER_BLOCK = 1e-3, 7e-4
"""8 MiB a block at 12 GB/s, as `slora_worker` has it."""
HALF_LIVES_S = (15.0, 60.0, 240.0, 960.0)


class LeastRecentlyUsed(LeastExpectedLoss):
    """The adapter that has been idle longest goes first."""

    def key(self, adapter: CachedAdapter, copy_s: float) -> float:
        """Alike: of equals, the one that came first goes."""
        return 0.0


ORDERS: dict[str, Callable[[], LeastExpectedLoss]] = {
    "least recently used": LeastRecentlyUsed,
    **{
        f"least loss, half-life {half_life_s:g} s": partial(LeastExpectedLoss, half_life_s)
        for half_life_s in HALF_LIVES_S
    },
}
TRACES = {
    "zipf 0.8": (0.8, 0.0, 0.0),
    "zipf 1.0": (1.0, 0.0, 0.0),
    "zipf 1.2": (1.2, 0.0, 0.0),
    "zipf 1.0, drifting": (1.0, 60.0, 0.1),
    "zipf 1.2, drifting": (1.2, 60.0, 0.1),
    "zipf 1.0, jumping": (1.0, 120.0, 1.0),
}
"""Exponent, seconds between changes, share of the adapters whose popularity changes."""


def arrivals(trace: str, seed: int) -> Iterator[tuple[float, int]]:
    """Times and adapters."""
    exponent, every_s, share = TRACES[trace]
    rng = random.Random(f"{trace}/{seed}")
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(NUM_ADAPTERS)))
    order = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    now, change_s = 0.0, every_s or DURATION_S
    while (now := now + rng.expovariate(RATE_PER_S)) < DURATION_S:
        if now >= change_s:
            change_s += every_s
            indices = rng.sample(range(NUM_ADAPTERS), int(share * NUM_ADAPTERS))
            moved = [order[index] for index in indices]
            rng.shuffle(moved)
            for index, adapter in zip(indices, moved, strict=True):
                order[index] = adapter
        yield now, order[bisect(weights, rng.random() * weights[-1])]


def run(order: LeastExpectedLoss, trace: str, seed: int) -> tuple[float, float]:
    """Misses a request and seconds of copies a request, after the first fifth."""
    num_blocks = [RANKS[i % len(RANKS)] // RANKS_PER_BLOCK for i in range(NUM_ADAPTERS)]
    arena = Arena(sum(num_blocks) // 10)
    limits = AdapterLimits(4096, max_adapter_blocks=64, max_pinned_blocks=0)
    cache = AdapterCache(arena, Reclaimer(arena), limits, order)
    rng = random.Random(f"holds/{seed}")
    held: list[tuple[float, int, str]] = []
    requests = misses = 0
    copies_s = 0.0
    for number, (now, adapter) in enumerate(arrivals(trace, seed)):
        while held and held[0][0] <= now:
            end_s, _, digest = heapq.heappop(held)
            cache.release([digest], end_s)
        digest = f"sha256:{adapter}"
        counts = now > DURATION_S / 5
        requests += counts
        if not cache.known([digest]):
            cache.fetched(digest, Path("/"), num_blocks[adapter], max_rank=64)
        if not cache.ready([digest]):
            misses += counts
            if not cache.load([digest], (), now):
                continue  # all are in use: a miss for every order
            cache.take_actions()
            copy_s = COPY_START_S + num_blocks[adapter] * COPY_S_PER_BLOCK
            cache.loaded(digest, copy_s)
            copies_s += counts * copy_s
        cache.acquire([digest], now)
        heapq.heappush(held, (now + rng.expovariate(1 / HOLD_S), number, digest))
    cache.check_integrity()
    return misses / requests, copies_s / requests


def main() -> None:
    """Print the tables and write `results/simulated/eviction.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for trace in TRACES:
        for name, make in ORDERS.items():
            pairs = [run(make(), trace, seed) for seed in range(args.seeds)]
            misses, copies_s = (statistics.fmean(column) for column in zip(*pairs, strict=True))
            runs.append({"trace": trace, "order": name, "misses": misses, "copies_s": copies_s})
    lru = {run["trace"]: run for run in runs if run["order"] == "least recently used"}
    for run_ in runs:
        run_["misses_over_lru"] = run_["misses"] / lru[run_["trace"]]["misses"]
        run_["copies_over_lru"] = run_["copies_s"] / lru[run_["trace"]]["copies_s"]
    for title, key in (("MISSES A REQUEST", "misses"), ("COPIES OVER LRU", "copies_over_lru")):
        by_place = {(run["trace"], run["order"]): run[key] for run in runs}
        rows = [[o, *(f"{by_place[t, o]:.3f}" for t in TRACES)] for o in ORDERS]
        print_table([title, *(t.upper() for t in TRACES)], rows)
        print()
    write_results("eviction", {"simulated": True, "runs": runs}, args)


if __name__ == "__main__":
    main()
