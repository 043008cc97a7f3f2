"""The classification heads of adapters, applied to the last hidden state."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.ops.lora.torch import add_lora
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class ScoreHead:
    """A site without outputs of its own: all its rows come from adapters."""

    def __init__(self, site_id: int) -> None:
        self.site_id = site_id

    def forward(self, hidden: Tensor, lora: LoraBatch) -> list[Tensor]:
        """Logits of each hidden row of `[n, H]`: float32 `[labels]` of its adapter; empty
        for rows without an adapter.

        `lora` runs over these rows.
        """
        counts = [0] * len(hidden)
        for run in lora.runs:
            delta = lora.table.get((run.slot, self.site_id))
            if delta is not None and delta.row_ids is not None:
                counts[run.begin : run.end] = [len(delta.row_ids)] * (run.end - run.begin)
        shape = len(hidden), max(counts, default=0)
        logits = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        add_lora(logits, hidden, self.site_id, lora)
        return [row[:count] for row, count in zip(logits, counts, strict=True)]
