"""Frees blocks for running requests: from idle adapters or from idle prefixes.

The blocks of both count as free. Each cache offers its cheapest item, and the item with the least
expected loss per block is evicted first:

    expected loss per block = probability of reuse * seconds to restore / blocks
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loraplex_services.worker.cache.arena import Arena


@dataclass(frozen=True, slots=True)
class Offer:
    """An idle item that could be evicted."""

    num_blocks: float
    """Its size in blocks. Fewer become free if it shares a block with others."""
    restore_s: float
    """Seconds to restore it: a copy for an adapter, a prefill for a prefix."""
    reuse: float
    """Probability that it is used again; only ratios matter."""

    @property
    def loss_per_block(self) -> float:
        """Expected seconds lost for each block gained."""
        return self.reuse * self.restore_s / self.num_blocks


def reuse_probability(idle_s: float) -> float:
    """The probability of a use in the next moment, up to a factor. Popularity is heavy-tailed, so
    it decreases approximately as the reciprocal of the time since the last use."""
    return 1.0 / (1.0 + max(0.0, idle_s))


class Idle(Protocol):
    """A cache in the arena. Items named in `protected` are not offered."""

    def idle_blocks(self, protected: Collection[str]) -> int:
        """Number of blocks that repeated calls of `give_up` would free."""
        ...

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        """The item that would be evicted next; None when nothing is idle."""
        ...

    def give_up(self, protected: Collection[str], whole_block: bool) -> None:
        """Free what `offer` named, and other items with it if a `whole_block` must become free."""
        ...


class Reclaimer:
    """Frees idle blocks of all its sources, the least expected loss first."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._sources: list[Idle] = []
        self.spared: Collection[str] = ()
        """Adapters of requests that start soon. They are evicted only if everything else is not
        enough."""

    def add(self, *sources: Idle) -> None:
        """Take idle blocks from `sources` as well."""
        self._sources += sources

    def idle_blocks(self, protected: Collection[str] = ()) -> int:
        """Blocks that could be reclaimed now."""
        return sum(source.idle_blocks(protected) for source in self._sources)

    def reclaim(self, num_blocks: int, now: float) -> bool:
        """Free idle blocks until `num_blocks` can be allocated.

        Returns False, freeing nothing, when that cannot be reached.
        """
        return self._reclaim(lambda: num_blocks, num_blocks, True, now, ())

    def reclaim_pages(self, num_pages: int, now: float, protected: Collection[str]) -> bool:
        """Free idle items until the arena can allocate `num_pages`.

        Returns False when that cannot be reached. Then nothing was freed, except for pages that are
        less than a block: they may be found in blocks that are not idle as a whole, so all idle
        items are tried.
        """
        needed = partial(self._arena.blocks_for, num_pages)
        whole_blocks = num_pages >= self._arena.pages_per_block
        return self._reclaim(needed, needed() * whole_blocks, whole_blocks, now, protected)

    def _reclaim(
        self,
        needed: Callable[[], int],
        least: int,
        whole_blocks: bool,
        now: float,
        protected: Collection[str],
    ) -> bool:
        """Free idle items until as many blocks as are needed then can be allocated, if `least`
        blocks could be."""
        for kept in ({*protected, *self.spared}, protected):
            if self._coming >= needed():
                break
            if self._coming + self.idle_blocks(kept) >= least:
                self._give_up_until(needed, whole_blocks, now, kept)
        return self._arena.num_free >= needed()

    @property
    def _coming(self) -> int:
        return self._arena.num_free + self._arena.num_retiring

    def _give_up_until(
        self,
        needed: Callable[[], int],
        whole_blocks: bool,
        now: float,
        protected: Collection[str],
    ) -> None:
        offers = [source.offer(protected, now) for source in self._sources]
        while self._coming < needed() and any(offers):
            _, index = min(
                (offer.loss_per_block, index) for index, offer in enumerate(offers) if offer
            )
            self._sources[index].give_up(protected, whole_blocks)
            offers[index] = self._sources[index].offer(protected, now)
