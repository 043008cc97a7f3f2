"""A mapping of bounded size, for keys that untrusted callers choose."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps the entries that were used most recently. The others make space for new ones."""

    def __init__(self, max_size: float) -> None:
        """`max_size`: of all entries together, in the unit of the sizes that `put` is given."""
        self._max_size = max_size
        self._size = 0.0
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether there is a value, which does not count as used by this."""
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None if the key has none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: float = 1.0) -> None:
        """Remember a value, unless it alone is too large. Mutates: may drop the entries that were
        used longest ago."""
        self.drop(key)
        if size > self._max_size:
            return
        self._entries[key] = value, size
        self._size += size
        while self._size > self._max_size:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        """Forget an entry, if there is one."""
        _, size = self._entries.pop(key, (None, 0.0))
        self._size -= size
