"""Which idle adapter goes next: orders over idle adapters, so kept that a choice costs O(log n).

`benchmarks/eviction.py` measures them on Zipf and drifting traces; `docs/performance-adapters.md`
says what came of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import Protocol

from services.worker.adapters.residency import CachedAdapter

COPY_START_S = 1e-3
"""A copy of an adapter takes this long plus its share for each block."""
DEFAULT_COPY_S_PER_BLOCK = 1e-4
"""Until a copy has been measured."""
HALF_LIFE_S = 60.0
"""A use counts half after this long."""


class IdleOrder(Protocol):
    """Idle adapters, the next to go first."""

    def used(self, adapter: CachedAdapter, now: float) -> None:
        """A running request starts to use `adapter`, which is not among the idle."""
        ...

    def enter(self, adapter: CachedAdapter) -> None:
        """`adapter` has become idle."""
        ...

    def leave(self, adapter: CachedAdapter) -> None:
        """`adapter`, which was idle, no longer is."""
        ...

    def next_victim(self, protected: Collection[str]) -> CachedAdapter | None:
        """The next to go of those whose digests are not `protected`; None when there is none."""
        ...

    def uses_per_s(self, adapter: CachedAdapter, now: float) -> float:
        """How often it was used of late; 0 where that is not counted."""
        ...


class LeastRecentlyUsed:
    """The adapter that has been idle longest goes first."""

    def __init__(self) -> None:
        self._idle: dict[str, CachedAdapter] = {}

    def used(self, adapter: CachedAdapter, now: float) -> None:
        """Nothing is counted."""

    def enter(self, adapter: CachedAdapter) -> None:
        """Goes last."""
        self._idle[adapter.digest] = adapter

    def leave(self, adapter: CachedAdapter) -> None:
        """Does not go."""
        del self._idle[adapter.digest]

    def next_victim(self, protected: Collection[str]) -> CachedAdapter | None:
        """The one that came first."""
        return next((a for a in self._idle.values() if a.digest not in protected), None)

    def uses_per_s(self, adapter: CachedAdapter, now: float) -> float:
        """Nothing is counted."""
        return 0.0


class LeastExpectedLoss:
    """The adapter whose absence costs least per block goes first: fading count of its uses times
    the seconds of a copy, over its blocks.

    All counts fade alike, so their order does not change while nothing is used: an idle adapter
    keeps one key, the logarithm of

        sum over uses of 2^(time of use / half-life) * copy seconds / blocks

    Source: LRFU (Lee et al.) for the fading count, GreedyDual-Size-Frequency (Cherkasova) for
    cost over size.
    """

    def __init__(
        self, half_life_s: float = HALF_LIFE_S, copy_s_per_block: float = DEFAULT_COPY_S_PER_BLOCK
    ) -> None:
        self._half_life_s = half_life_s
        self._copy_s_per_block = copy_s_per_block
        self._heap: list[tuple[float, int, CachedAdapter]] = []
        self._entries: dict[str, int] = {}
        """Number of the entry of each idle adapter; others in the heap are outdated."""
        self._num_entered = 0

    def used(self, adapter: CachedAdapter, now: float) -> None:
        """Counts."""
        use = now / self._half_life_s
        low, high = sorted((adapter.heat, use))
        adapter.heat = high + math.log2(1.0 + 2.0 ** (low - high))

    def enter(self, adapter: CachedAdapter) -> None:
        """Takes its place by what its absence would cost."""
        self._num_entered += 1
        self._entries[adapter.digest] = self._num_entered
        copy_s = COPY_START_S + adapter.num_blocks * self._copy_s_per_block
        unused = adapter.heat == -math.inf  # loaded ahead of requests: counts like one use
        heat = adapter.last_used_s / self._half_life_s if unused else adapter.heat
        key = heat + math.log2(copy_s / adapter.num_blocks)
        heapq.heappush(self._heap, (key, self._num_entered, adapter))

    def leave(self, adapter: CachedAdapter) -> None:
        """Does not go."""
        del self._entries[adapter.digest]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def next_victim(self, protected: Collection[str]) -> CachedAdapter | None:
        """The one with the least key."""
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
        """Of the last half-life, about."""
        count: float = 2.0 ** (adapter.heat - now / self._half_life_s)
        return count * math.log(2) / self._half_life_s

    def _is_live(self, entry: tuple[float, int, CachedAdapter]) -> bool:
        return self._entries.get(entry[-1].digest) == entry[1]
