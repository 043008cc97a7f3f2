"""Chooses the idle adapter to evict next. A choice among n idle adapters takes O(log n).

`benchmarks/scheduling/eviction.py` measures the order on Zipf and drifting traces. The results are
in `docs/performance/adapters.md`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from loraplex_services.worker.types.residency import CachedAdapter

HALF_LIFE_S = 60.0
"""Half-life of the weight of a use, in seconds."""
COPY_START_S = 1e-3
"""Fixed part of the duration of an adapter's copy, in seconds."""
COPY_S_PER_BLOCK = 1e-4
"""Seconds per block, until copies have been measured."""


class CopyTimes:
    """How long copies to the device take: an exponential average of measured ones."""

    def __init__(self) -> None:
        self._s_per_block = COPY_S_PER_BLOCK

    def add(self, num_blocks: float, seconds: float) -> None:
        """Record a copy of `num_blocks` that took `seconds`."""
        self._s_per_block += 0.1 * (seconds / num_blocks - self._s_per_block)

    def seconds(self, num_blocks: float) -> float:
        """Expected time of a copy."""
        return COPY_START_S + num_blocks * self._s_per_block


class LeastExpectedLoss:
    """Evicts the adapter whose absence costs least per page: the decaying count of its uses, times
    the seconds of a copy, divided by its pages.

    All counts decay at the same rate, so their order does not change while adapters are idle. An
    idle adapter therefore keeps one key, the logarithm of

        sum over uses of 2^(time of use / half-life) * copy seconds / pages

    Source: LRFU (Lee et al.) for the decaying count, GreedyDual-Size-Frequency (Cherkasova) for
    the cost divided by the size.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._heap: list[tuple[float, int, CachedAdapter]] = []
        self._entries: dict[str, int] = {}
        """Number of the current heap entry of each idle adapter. Other entries are outdated."""
        self._num_entered = 0

    def used(self, adapter: CachedAdapter, now: float) -> None:
        """Note that a running request starts to use `adapter`, which is not idle."""
        use = now / self._half_life_s
        low, high = sorted((adapter.heat, use))
        adapter.heat = high + math.log2(1.0 + 2.0 ** (low - high))

    def enter(self, adapter: CachedAdapter, copy_s: float) -> None:
        """Note that `adapter` has become idle. Loading it again would take `copy_s` seconds."""
        self._num_entered += 1
        self._entries[adapter.digest] = self._num_entered
        key = self.key(adapter, copy_s)
        heapq.heappush(self._heap, (key, self._num_entered, adapter))

    def key(self, adapter: CachedAdapter, copy_s: float) -> float:
        """Logarithm of the expected cost per page of the adapter's absence."""
        unused = adapter.heat == -math.inf  # loaded ahead of requests: counts like one use
        heat = adapter.last_used_s / self._half_life_s if unused else adapter.heat
        return heat + math.log2(copy_s / adapter.num_pages)

    def leave(self, adapter: CachedAdapter) -> None:
        """Note that `adapter` is no longer idle."""
        del self._entries[adapter.digest]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def next_victim(self, protected: Collection[str]) -> CachedAdapter | None:
        """The idle adapter to evict next, except `protected` digests; None if there is none."""
        spared: list[tuple[float, int, CachedAdapter]] = []
        victim = None
        while self._heap:
            entry = self._heap[0]
            if self._is_live(entry) and entry[-1].digest not in protected:
                victim = entry[-1]
                break
            if self._is_live(heapq.heappop(self._heap)):
                spared.append(entry)
        for entry in spared:
            heapq.heappush(self._heap, entry)
        return victim

    def uses_per_s(self, adapter: CachedAdapter, now: float) -> float:
        """Approximate number of uses per second in the last half-life."""
        count: float = 2.0 ** (adapter.heat - now / self._half_life_s)
        return count * math.log(2) / self._half_life_s

    def _is_live(self, entry: tuple[float, int, CachedAdapter]) -> bool:
        return self._entries.get(entry[-1].digest) == entry[1]
