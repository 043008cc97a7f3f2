"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""By the names of `hidden_act`."""


Gate = Callable[[Tensor], Tensor]
"""act(first half) * second half: `[T, 2 * width]` -> `[T, width]`."""


class GatedMlp:
    """down(act(gate x) * up x), gate and up stacked in one site."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear, gate: Gate) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gate = gate

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        gated = self._gate(self._gate_up.forward(x, batch.lora))
        return self._down.forward(gated, batch.lora)
