"""Counts of each token that penalties of a request look at, kept between steps.

Counting again would cost a step time that grows with the length of all outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from loraplex_services.worker.types.request import Request

FIRST_CAPACITY = 64


class OutputCounts:
    """The distinct tokens of a prompt and its output, in the order in which they first came."""

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._prompt_ids = prompt_ids
        self._num_counted = 0
        self._ids = np.empty(FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.empty(FIRST_CAPACITY, dtype=np.float32)
        self._index: dict[int, int] = {}
        self._start()

    def count(self, output_ids: list[int], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens of the prompt and of the first `num_tokens` of the output, int64, and how
        often each is in that output, float32. Both are views that the next call changes."""
        if num_tokens < self._num_counted:
            self._start()
        for token_id in output_ids[self._num_counted : num_tokens]:
            index = self._index.get(token_id)
            if index is None:
                self._append(token_id, 1)
            else:
                self._counts[index] += 1
        self._num_counted = num_tokens
        num_distinct = len(self._index)
        return self._ids[:num_distinct], self._counts[:num_distinct]

    def _start(self) -> None:
        self._num_counted = 0
        self._index.clear()
        for token_id in dict.fromkeys(self._prompt_ids):
            self._append(token_id, 0)

    def _append(self, token_id: int, count: int) -> None:
        index = self._index[token_id] = len(self._index)
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[index], self._counts[index] = token_id, count


_known: WeakKeyDictionary[Request, OutputCounts] = WeakKeyDictionary()


def output_counts(request: Request, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """See `OutputCounts.count`, of a request. Its prompt counts for the repetition penalty only."""
    counts = _known.get(request)
    if counts is None:
        has_prompt = request.sampling.repetition_penalty != 1.0
        counts = _known[request] = OutputCounts(request.prompt_ids if has_prompt else ())
    return counts.count(request.output_ids, num_tokens)
