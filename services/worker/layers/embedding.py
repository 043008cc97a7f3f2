"""The embedding, with the adapters of the batch."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.ops.lora.torch import add_lora_embedding
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class LoraEmbedding:
    """Rows of a table by token id.

    With several ranks each has the rows of some tokens. The sum over the ranks has one addend that
    is not zero, so it is exact. What adapters add comes after it, on every rank.
    """

    def __init__(self, site_id: int, weight: Tensor, vocab_size: int, ranks: Ranks) -> None:
        """`weight`: `[vocabulary, hidden]`, or this rank's rows of it."""
        self.site_id = site_id
        self.weight = weight
        self._vocab_size = vocab_size
        self._ranks = ranks
        self._first_id = ranks.shard.vocabulary(vocab_size)[0]

    def forward(self, token_ids: Tensor, lora: LoraBatch) -> Tensor:
        """int64 `[T]` -> `[T, hidden]`."""
        known_ids = token_ids
        if lora.resized(self.site_id):  # tokens that only adapters know get their rows below
            known_ids = token_ids.clamp(max=self._vocab_size - 1)
        y = self._look_up(known_ids)
        add_lora_embedding(y, token_ids, self.site_id, lora)
        return y

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._ranks.shard.size == 1:
            return self.weight[token_ids]
        rows = token_ids - self._first_id
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        y = self.weight[rows.clamp(0, len(self.weight) - 1)]
        return self._ranks.all_reduce(y.masked_fill_(is_elsewhere[:, None], 0.0))
