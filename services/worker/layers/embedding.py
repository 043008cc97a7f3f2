"""The embedding, with the adapters of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class TokenTable:
    """Rows by token id.

    With several ranks each has the rows of some tokens. The sum over the ranks has one addend that
    is not zero, so it is exact.
    """

    def __init__(self, weight: Tensor, vocab_size: int, ranks: Ranks, dtype: torch.dtype) -> None:
        """`dtype` is that of the result.

        Args:
            weight: `[vocabulary, width]`, or this rank's rows of it; see `Operators.table`.
        """
        self.weight = weight
        self.vocab_size = vocab_size
        self.dtype = dtype
        self._ranks = ranks
        self._first_id = ranks.shard.vocabulary(vocab_size)[0]

    def look_up(self, token_ids: Tensor) -> Tensor:
        """int64 `[T]` -> `[T, width]`."""
        if self._ranks.shard.size == 1:
            return self.weight[token_ids].to(self.dtype)
        rows = token_ids - self._first_id
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        y = self.weight[rows.clamp(0, len(self.weight) - 1)].to(self.dtype)
        return self._ranks.all_reduce(y.masked_fill_(is_elsewhere[:, None], 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class LoraEmbedding:
    """The embedding of a base. What adapters add to it is computed on every rank."""

    site_id: int
    table: TokenTable
    add_lora: Callable[[Tensor, Tensor, int, LoraBatch], None]
    """`Operators.add_lora_embedding`."""

    @property
    def weight(self) -> Tensor:
        """`[vocabulary, hidden]`, or this rank's rows of it."""
        return self.table.weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result of `forward`."""
        return self.table.dtype

    def forward(self, token_ids: Tensor, lora: LoraBatch) -> Tensor:
        """int64 `[T]` -> `[T, hidden]`."""
        known_ids = token_ids
        if lora.resized(self.site_id):  # tokens that only adapters know get their rows below
            known_ids = token_ids.clamp(max=self.table.vocab_size - 1)
        y = self.table.look_up(known_ids)
        self.add_lora(y, token_ids, self.site_id, lora)
        return y
