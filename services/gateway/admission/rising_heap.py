"""A heap whose keys may only rise, and of which only the first items are read."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

SortKey = tuple[float, ...]
Item = TypeVar("Item", bound=Hashable)


class RisingHeap(Generic[Item]):
    """A heap in which each item keeps the key that it had when it was last on top, which is at most
    its present key. Looking for the first item touches only items whose old keys come before the
    least present key."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, Item]] = []
        self._entries: dict[Item, tuple[SortKey, int, Item]] = {}
        """The valid entry of each item; other entries are dropped when they reach the top."""
        self._num_pushed = 0

    def push(self, item: Item) -> None:
        """Add an item."""
        self._num_pushed += 1
        entry = self._entries[item] = ((), self._num_pushed, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove an item."""
        self._entries.pop(item, None)

    def first(self, key_of: Callable[[Item], SortKey]) -> Item | None:
        """The item with the least key; None if the heap is empty. Keys differ."""
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
                return item
        return None
