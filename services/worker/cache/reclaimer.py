"""Frees blocks for running requests: from idle adapters or from idle prefixes.

The blocks of both count as free. Each cache offers its cheapest item, and the item with the least
expected loss per block is evicted first:

    expected loss per block = probability of reuse * seconds to restore / blocks
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from loraplex_services.worker.cache.arena import Arena


@dataclass(frozen=True, slots=True)
class Offer:
    """An idle item that could be evicted."""

    num_blocks: int
    restore_s: float
    """Seconds to restore it: a copy for an adapter, a prefill for a prefix."""
    reuse: float
    """Probability that it is used again; only ratios matter."""

    @property
    def loss_per_block(self) -> float:
        """Seconds lost for each block gained, expected."""
        return self.reuse * self.restore_s / self.num_blocks


def reuse_probability(idle_s: float) -> float:
    """Decreases with idle time.

    Popularity is heavy-tailed, so the probability of a use in the next moment decreases about like
    the reciprocal of the time since the last one.
    """
    return 1.0 / (1.0 + max(0.0, idle_s))


class Idle(Protocol):
    """A cache in the arena. Items named in `protected` are not offered."""

    def idle_blocks(self, protected: Collection[str]) -> int:
        """Blocks that `give_up`, called often enough, would free."""
        ...

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        """The item that would be evicted next; None when nothing is idle."""
        ...

    def give_up(self, protected: Collection[str]) -> None:
        """Free what `offer` named."""
        ...


class Reclaimer:
    """Frees idle blocks of all its sources, least expected loss first."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._sources: list[Idle] = []
        self.spared: Collection[str] = ()
        """Adapters of requests that start soon, which are evicted only if everything else is not
        enough."""

    def add(self, *sources: Idle) -> None:
        """Take idle blocks from these as well."""
        self._sources += sources

    def idle_blocks(self, protected: Collection[str] = ()) -> int:
        """Blocks that could be reclaimed now."""
        return sum(source.idle_blocks(protected) for source in self._sources)

    def reclaim(self, num_blocks: int, now: float, protected: Collection[str] = ()) -> bool:
        """Free idle blocks until `num_blocks` can be allocated.

        Returns False, freeing nothing, when that cannot be reached.
        """
        if self._coming < num_blocks:
            kept: Collection[str] = {*protected, *self.spared}
            if self._coming + self.idle_blocks(kept) < num_blocks:
                kept = protected
                if self._coming + self.idle_blocks(kept) < num_blocks:
                    return False
            self._give_up_until(num_blocks, now, kept)
        return self._arena.num_free >= num_blocks

    @property
    def _coming(self) -> int:
        return self._arena.num_free + self._arena.num_retiring

    def _give_up_until(self, num_blocks: int, now: float, protected: Collection[str]) -> None:
        offers = [source.offer(protected, now) for source in self._sources]
        while self._coming < num_blocks:
            _, index = min(
                (offer.loss_per_block, index) for index, offer in enumerate(offers) if offer
            )
            self._sources[index].give_up(protected)
            offers[index] = self._sources[index].offer(protected, now)
