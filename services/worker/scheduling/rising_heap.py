"""A heap whose keys may only rise, and of which only the first items are read."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from loraplex_services.worker.scheduling.policies import SortKey

Item = TypeVar("Item", bound=Hashable)

LAST: SortKey = (math.inf,)
"""Key of an empty group."""


class RisingHeap(Generic[Item]):
    """Each item stands under the key that it had when it was last on top, which is no more than
    its key of now. So a look costs as much as there are items whose old keys come before the least
    key, and none of the others is touched.

    Where only the first parts of keys rise, an item stands under these alone, and all whose first
    parts may come before the least key are looked at each time."""

    def __init__(self, num_rising: int | None = None) -> None:
        """`num_rising`: how many parts of a key, from its first, only rise; None = all."""
        self._num_rising = num_rising
        self._heap: list[tuple[SortKey, int, Item]] = []
        self._entries: dict[Item, tuple[SortKey, int, Item]] = {}
        """The valid entry of each item; other entries are dropped when they reach the top."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def push(self, item: Item) -> None:
        """Add an item, or enter one again whose key may have fallen."""
        self._num_pushed += 1
        entry = self._entries[item] = ((), self._num_pushed, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove an item."""
        self._entries.pop(item, None)

    def first(self, key_of: Callable[[Item], SortKey]) -> tuple[SortKey, Item | None]:
        """The least key, and its item; `LAST` and None if the heap is empty. Keys differ."""
        if self._num_rising is not None:
            return self._first_of_some(key_of)
        while self._heap:
            entry = self._heap[0]
            old_key, number, item = entry
            if self._entries.get(item) is not entry:
                heapq.heappop(self._heap)
                continue
            key = key_of(item)
            if key > old_key:
                entry = self._entries[item] = (key, number, item)
                heapq.heapreplace(self._heap, entry)
            if self._heap[0] is entry:
                return key, item
        return LAST, None

    def _first_of_some(self, key_of: Callable[[Item], SortKey]) -> tuple[SortKey, Item | None]:
        """`first` for heaps whose last parts of keys may fall."""
        best: tuple[SortKey, Item | None] = LAST, None
        seen = []
        while self._heap and self._heap[0][0] < best[0]:
            entry = heapq.heappop(self._heap)
            _, number, item = entry
            if self._entries.get(item) is not entry:
                continue
            key = key_of(item)
            entry = self._entries[item] = (key[: self._num_rising], number, item)
            seen.append(entry)
            if key < best[0]:
                best = key, item
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return best
