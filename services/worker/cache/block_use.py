"""Counts the blocks that adapters hold, and those that can be reclaimed from them.

A block that adapters share can be reclaimed while all of these are idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.types.extents import count_most_blocks
from loraplex_services.worker.types.residency import CachedAdapter


class BlockUse:
    """Counts the blocks of the adapters in one arena. Only adapters split its blocks."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.num_pages = 0
        """Pages of all resident adapters."""
        self.held_pages = 0
        """Pages of those that are not idle."""
        self._held_whole = 0
        self._idle_whole = 0
        self._held_parts: NonzeroCounter[int] = NonzeroCounter()
        """Number of extents of adapters that are not idle, by split block."""
        self._sharers: dict[int, dict[str, None]] = {}
        """Digests of the resident adapters in each split block, in the order of their loads, so
        that evictions do not depend on hash values."""

    @property
    def held(self) -> int:
        """Number of blocks in which an adapter that is not idle has pages."""
        return self._held_whole + len(self._held_parts)

    @property
    def idle(self) -> int:
        """Number of blocks in which only idle adapters have pages."""
        return self._idle_whole + self._arena.num_split - len(self._held_parts)

    def add(self, adapter: CachedAdapter) -> None:
        """Add a new resident adapter, which is not idle."""
        self.num_pages += adapter.num_pages
        self._hold(adapter)
        for block in self._parts(adapter):
            self._sharers.setdefault(block, {})[adapter.digest] = None

    def drop(self, adapter: CachedAdapter) -> None:
        """Remove an adapter that was not idle and whose blocks have been given back."""
        self.num_pages -= adapter.num_pages
        self._held_whole -= self._num_whole(adapter)
        self._release(adapter)
        for block in {*self._parts(adapter)}:
            del self._sharers[block][adapter.digest]
            if not self._sharers[block]:
                del self._sharers[block]

    def enter_idle(self, adapter: CachedAdapter) -> None:
        """Note that a resident adapter has become idle."""
        self._held_whole -= self._num_whole(adapter)
        self._idle_whole += self._num_whole(adapter)
        self._release(adapter)

    def leave_idle(self, adapter: CachedAdapter) -> None:
        """Note that a resident adapter is no longer idle."""
        self._idle_whole -= self._num_whole(adapter)
        self._hold(adapter)

    def idle_of(self, adapters: Iterable[CachedAdapter]) -> int:
        """Number of idle blocks in which the given idle adapters have pages."""
        parts: set[int] = set()
        num_blocks = 0
        for adapter in adapters:
            num_blocks += self._num_whole(adapter)
            parts.update(self._parts(adapter))
        return num_blocks + len(parts - self._held_parts.keys())

    def co_residents(self, adapter: CachedAdapter, protected: Collection[str]) -> Collection[str]:
        """The adapters that share a split block with an idle adapter; of its split blocks, the one
        that takes the fewest evictions to free. Empty if all of them also hold adapters that are in
        use or `protected`.

        The result is also empty for an adapter with a block of its own, because evicting it frees
        that block. Its parts of split blocks then stay empty until another adapter is loaded. Once
        such empty parts add up to a block, these adapters are treated like the others."""
        if self._num_whole(adapter) and self._arena.num_loose < self._arena.pages_per_block:
            return ()
        blocks = {*self._parts(adapter)}.difference(self._held_parts)
        sharers = (self._sharers[block] for block in blocks)
        idle = (some for some in sharers if some.keys().isdisjoint(protected))
        choices = [[digest for digest in some if digest != adapter.digest] for some in idle]
        return min(choices, key=len, default=())

    def most_of(self, adapter: CachedAdapter) -> int:
        """Upper bound on the blocks in which an adapter has pages, wherever it is loaded."""
        return count_most_blocks(adapter.num_pages, self._arena.pages_per_block)

    def check_integrity(self, adapters: Iterable[CachedAdapter]) -> None:
        """Assert that the counts are those of the given residents."""
        residents = list(adapters)
        expected = BlockUse(self._arena)
        for adapter in residents:
            expected.add(adapter)
            if adapter.is_idle:
                expected.enter_idle(adapter)
        assert (expected.held, expected.idle) == (self.held, self.idle)
        assert (expected.num_pages, expected.held_pages) == (self.num_pages, self.held_pages)
        assert expected._held_parts == self._held_parts
        assert expected._sharers == self._sharers
        split = {block for adapter in residents for block in self._parts(adapter)}
        assert len(split) == self._arena.num_split, "a split block without an adapter"

    def _num_whole(self, adapter: CachedAdapter) -> int:
        return adapter.num_pages // self._arena.pages_per_block

    def _hold(self, adapter: CachedAdapter) -> None:
        self.held_pages += adapter.num_pages
        self._held_whole += self._num_whole(adapter)
        self._held_parts.update(self._parts(adapter))

    def _parts(self, adapter: CachedAdapter) -> list[int]:
        """The split blocks in which an adapter has pages, once for each of its extents."""
        first_pages = adapter.first_pages[self._num_whole(adapter) :]
        return [first_page // self._arena.pages_per_block for first_page in first_pages]

    def _release(self, adapter: CachedAdapter) -> None:
        self.held_pages -= adapter.num_pages
        for block in self._parts(adapter):
            self._held_parts.remove(block)
