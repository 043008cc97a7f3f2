"""The pooled vectors of prompts that a step computes, completely or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.api.pooling import Pooling
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.transfers import to_device, to_host
from loraplex_services.worker.types.step_plan import PlannedRow

Scores = Callable[[Tensor, LoraBatch], list[Tensor]]
"""Hidden rows `[n, H]` and their adapters -> float32 `[labels]` of each."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The concatenated vectors, possibly still being copied to the host."""

    values: Tensor
    """float32, flat."""
    lengths: tuple[int, ...]
    """Length of each row's vector; 0 = it has none."""

    def read(self) -> Iterator[tuple[float, ...]]:
        """The vector of each row. The copy must have ended."""
        flat = self.values.tolist()
        begin = 0
        for length in self.lengths:
            yield tuple(flat[begin : begin + length])
            begin += length


def pool(
    rows: Sequence[PlannedRow], hidden: Tensor, lora: LoraBatch, scores: Scores
) -> PooledRows | None:
    """The vectors of the rows that pool; None if there are none. They are the last hidden states of
    complete prompts, or their scores. For requests of a mean, they are the sums of the hidden
    states that this step computes.

    Args:
        rows: the contexts of a step, with which its token rows begin.
        hidden: `[T, H]`.
    """
    vectors: list[Tensor | None] = [None] * len(rows)
    heads: list[tuple[int, int]] = []
    end = 0
    for index, row in enumerate(rows):
        begin, end = end, end + row.num_tokens
        pooling = row.request.pooling
        if pooling is Pooling.MEAN:
            vectors[index] = hidden[begin:end].float().sum(dim=0)
        elif pooling is Pooling.LAST and row.needs_logits:
            vectors[index] = hidden[end - 1].float()
        elif pooling is Pooling.HEAD and row.needs_logits:
            heads.append((index, end - 1))
    if heads:
        last_rows = [row for _, row in heads]
        picked = hidden.index_select(0, to_device(torch.tensor(last_rows), hidden.device))
        found = scores(picked, lora.select(last_rows))
        for (index, _), vector in zip(heads, found, strict=True):
            vectors[index] = vector
    lengths = tuple(0 if vector is None else len(vector) for vector in vectors)
    if not any(lengths):
        return None
    return PooledRows(to_host(torch.cat([v for v in vectors if v is not None])), lengths)
