"""Counts by key, of which those that have become 0 are forgotten."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

K = TypeVar("K")


class NonzeroCounter(Counter[K]):
    """A `Counter` whose keys are those with a count, so that callers cannot fill the memory."""

    def remove(self, key: K, count: int = 1) -> None:
        """Subtract from the count of a key."""
        self[key] -= count
        if not self[key]:
            del self[key]
