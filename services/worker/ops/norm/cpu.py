"""Root-mean-square normalization in the C++ library (`native/src/elementwise.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.norm.torch import NormWeight, scaling_weight


class NativeNorm:
    """A norm in one pass, and one more for each adapter that trains it."""

    def __init__(self, native: Native, site_id: int, weight: NormWeight) -> None:
        self._native = native
        self._site_id = site_id
        self._dtype = torch.float32 if weight.in_float32 else weight.weight.dtype
        self._weight = scaling_weight(weight).float()
        self._eps = weight.eps
        self._in_float32 = weight.in_float32

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        rows = x.flatten(1)  # heads lie side by side
        assert update is None or rows.data_ptr() == x.data_ptr(), "the update belongs to x"
        y = self._native.norm(rows, update, self._weight, self._eps, self._in_float32)
        if lora.trains_norms:
            self._apply_own(y, rows, lora)
        return y.view(x.shape)

    def _apply_own(self, y: Tensor, rows: Tensor, lora: LoraBatch) -> None:
        for run in lora.runs:
            delta = lora.table.get((run.slot, self._site_id))
            if delta is not None and delta.norm:
                weight = torch.cat([tile.data[0] for tile in delta.norm]).to(self._dtype).float()
                own = rows[run.begin : run.end]
                y[run.begin : run.end] = self._native.norm(
                    own, None, weight, self._eps, self._in_float32
                )
