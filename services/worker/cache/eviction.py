"""Which idle adapter goes next: an order over idle adapters, so kept that a choice costs O(log n).

`benchmarks/scheduling/eviction.py` measures it on Zipf and drifting traces; `docs/performance/`
says what came of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from loraplex_services.worker.types.residency import CachedAdapter

HALF_LIFE_S = 60.0
"""A use counts half after this long."""
COPY_START_S = 1e-3
"""A copy of an adapter takes this long plus its share for each block."""
COPY_S_PER_BLOCK = 1e-4
"""Until copies have been measured."""


class CopyTimes:
    """How long copies to the device take, as measured recently."""

    def __init__(self) -> None:
        self._s_per_block = COPY_S_PER_BLOCK

    def add(self, num_blocks: int, seconds: float) -> None:
        """A copy took this long."""
        self._s_per_block += 0.1 * (seconds / num_blocks - self._s_per_block)

    def seconds(self, num_blocks: int) -> float:
        """What a copy would take."""
        return COPY_START_S + num_blocks * self._s_per_block


class LeastExpectedLoss:
    """The adapter whose absence costs least per block goes first: fading count of its uses times
    the seconds of a copy, over its blocks.

    All counts fade alike, so their order does not change while nothing is used: an idle adapter
    keeps one key, the logarithm of

        sum over uses of 2^(time of use / half-life) * copy seconds / blocks

    Source: LRFU (Lee et al.) for the fading count, GreedyDual-Size-Frequency (Cherkasova) for
    cost over size.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._heap: list[tuple[float, int, CachedAdapter]] = []
        self._entries: dict[str, int] = {}
        """Number of the entry of each idle adapter; others in the heap are outdated."""
        self._num_entered = 0

    def used(self, adapter: CachedAdapter, now: float) -> None:
        """A running request starts to use `adapter`, which is not among the idle."""
        use = now / self._half_life_s
        low, high = sorted((adapter.heat, use))
        adapter.heat = high + math.log2(1.0 + 2.0 ** (low - high))

    def enter(self, adapter: CachedAdapter, copy_s: float) -> None:
        """`adapter` has become idle; to have it back would take a copy of `copy_s` seconds."""
        self._num_entered += 1
        self._entries[adapter.digest] = self._num_entered
        key = self.key(adapter, copy_s)
        heapq.heappush(self._heap, (key, self._num_entered, adapter))

    def key(self, adapter: CachedAdapter, copy_s: float) -> float:
        """Logarithm of what its absence would cost for each block."""
        unused = adapter.heat == -math.inf  # loaded ahead of requests: counts like one use
        heat = adapter.last_used_s / self._half_life_s if unused else adapter.heat
        return heat + math.log2(copy_s / adapter.num_blocks)

    def leave(self, adapter: CachedAdapter) -> None:
        """`adapter`, which was idle, no longer is."""
        del self._entries[adapter.digest]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def next_victim(self, protected: Collection[str]) -> CachedAdapter | None:
        """The next to go of those whose digests are not `protected`; None when there is none."""
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
        """How often it was used in the last half-life, about."""
        count: float = 2.0 ** (adapter.heat - now / self._half_life_s)
        return count * math.log(2) / self._half_life_s

    def _is_live(self, entry: tuple[float, int, CachedAdapter]) -> bool:
        return self._entries.get(entry[-1].digest) == entry[1]
