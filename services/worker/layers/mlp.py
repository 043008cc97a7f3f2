"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.ops.activation.torch import Gate
from loraplex_services.worker.ops.linear.torch import JoinedGate


class GatedMlp:
    """down(act(gate x) * up x), gate and up stacked in one site."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear, gate: Gate) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = gate
        base, has_bias = gate_up.base, gate_up.bias is not None
        self._joined = base.gated if isinstance(base, JoinedGate) and not has_bias else None

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        if self._joined is not None and not batch.lora.runs:
            gated = self._joined(x)
        else:
            gated = self._gate(self._gate_up.forward(x, batch.lora))
        return self._down.forward(gated, batch.lora)
