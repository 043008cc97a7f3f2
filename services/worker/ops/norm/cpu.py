"""Root-mean-square normalization in the C++ library (`native/src/elementwise.cpp`)."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.norm.torch import NormWeight, RmsNorm


class NativeNorm:
    """A norm in one pass; batches whose adapters train norms use torch."""

    def __init__(self, native: Native, site_id: int, weight: NormWeight) -> None:
        self._native = native
        self._portable = RmsNorm(site_id, weight)
        self._weight = self._portable.weight.float()
        self._eps = weight.eps
        self._in_float32 = weight.in_float32

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        if lora.trains_norms:
            return self._portable.forward(x, lora, update)
        rows = x.flatten(1)  # heads lie side by side
        assert update is None or rows.data_ptr() == x.data_ptr(), "the update belongs to x"
        y = self._native.norm(rows, update, self._weight, self._eps, self._in_float32)
        return y.view(x.shape)
