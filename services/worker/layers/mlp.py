"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.ops.activation.torch import Gate


class GatedMlp:
    """down(act(gate x) * up x), gate and up stacked in one site."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear, gate: Gate) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = gate

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        gated = self._gate_up.gated(x, batch.lora)
        if gated is None:
            gated = self._gate(self._gate_up.forward(x, batch.lora))
        return self._down.forward(gated, batch.lora)
