"""The embedding, with the adapters of the batch."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.ops.lora.torch import add_lora_embedding
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class LoraEmbedding:
    """Rows of a table by token id: `weight` is `[vocabulary, hidden]`."""

    def __init__(self, site_id: int, weight: Tensor) -> None:
        self.site_id = site_id
        self.weight = weight

    def forward(self, token_ids: Tensor, lora: LoraBatch) -> Tensor:
        """int64 `[T]` -> `[T, hidden]`."""
        known_ids = token_ids
        if lora.resized(self.site_id):  # tokens that only adapters know get their rows below
            known_ids = token_ids.clamp(max=len(self.weight) - 1)
        y = self.weight[known_ids]
        add_lora_embedding(y, token_ids, self.site_id, lora)
        return y
