"""A recurrent layer: projections, update of the state, gated norm, output projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.ops.activation.torch import Gated
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.recurrence.backend import DeltaNet
from loraplex_services.worker.ops.rope.torch import CosSin

Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Outputs of the first projection -> queries, keys and values `[T, channels]`, gates
`[T, Hv * Dv]`, and b and a `[T, Hv]`: see `ops/recurrence`."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """Implements `model.decoder.Mixer`. Positions have no influence, because the state decays."""

    in_proj: LoraLinear
    out_proj: LoraLinear
    net: DeltaNet
    norm: Norm
    """The norm of each head."""
    split: Split
    value_dim: int
    """Width of a head."""
    gated: Gated
    """Multiplies by the silu of the gate."""

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        assert batch.states is not None, "the plan has states for bases with recurrent layers"
        qkv, gates, b, a = self.split(self.in_proj.forward(x, batch.lora))
        read = self.net.forward(qkv, a, b, batch.states)
        heads = self.norm.forward(read.view(len(x), -1, self.value_dim), batch.lora)
        gated = self.gated(gates.float(), heads.flatten(1).float())
        return self.out_proj.forward(gated.to(x.dtype), batch.lora)
