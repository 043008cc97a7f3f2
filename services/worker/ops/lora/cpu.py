"""The low-rank update in C++ (`native/src/lora.cpp`): all runs of a site in one call."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class NativeLora:
    """`add_lora` of one loaded library."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `torch.add_lora`; y and x float32 or bfloat16, tiles of any float dtype."""
        if not lora.runs:
            return
        if lora.replaces_rows(site_id):
            portable.add_lora(y, x, site_id, lora)
        else:
            self._native.add_lora(y, x, site_id, lora.packed_runs)
