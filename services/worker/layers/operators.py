"""The operators that layers are built from, chosen once per runner: plain torch here, C++ in
`native_operators`, Triton in `triton_operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex_services.worker.layers.moe import (
    Expert,
    ExpertMlps,
    ExpertWeights,
    LoopedExperts,
)
from loraplex_services.worker.layers.ranks import OneRank, Ranks
from loraplex_services.worker.ops.activation.torch import (
    Activation,
    Gate,
    Gated,
    plain_gate,
    plain_gated,
)
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.torch import VanillaAttention
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import BaseLinear, DenseLinear
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe.torch import ChooseExperts, choose_experts
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight, RmsNorm
from loraplex_services.worker.ops.recurrence.backend import DeltaNet, DeltaWeights
from loraplex_services.worker.ops.recurrence.torch import TorchDeltaNet
from loraplex_services.worker.ops.rope.torch import Rotate, rotate_heads
from loraplex_services.worker.sampling.drawing import TORCH_DRAWS
from loraplex_services.worker.types.division import ONE_MATRIX, Division
from loraplex_services.worker.types.model_config import RecurrenceConfig

AddLora = Callable[[Tensor, Tensor, int, LoraBatch], None]
"""(y, x, site id, batch): see `ops/lora`."""


class Operators:
    """The operations that layers are built from, in plain torch, on any device and in any dtype.
    Subclasses have kernels for some of them."""

    name = "torch"
    """Name in logs and in the numerics fingerprint."""
    rotate: Rotate = staticmethod(rotate_heads)
    """Rotates the heads of queries and keys, in place or not."""
    choose_experts: ChooseExperts = staticmethod(choose_experts)
    """Chooses the experts of each row."""
    draws = TORCH_DRAWS
    """How tokens are drawn from logits."""

    def __init__(self) -> None:
        self.ranks: Ranks = OneRank()
        """Ranks that share the base; one by default."""
        self.attention_maker = AttentionMaker(VanillaAttention)
        """Makes each layer's attention backend, and the metadata of each step."""
        self.division: Division = ONE_MATRIX
        """How they divide adapters."""
        self.keeps_half = False
        """Whether products in float32 and tables take weights in half precision."""

    def linear(self, weight: Tensor, activation: Activation | None = None) -> BaseLinear:
        """A base product; the weight `[out, in]` is not needed afterwards. If its outputs go to the
        `gate` of an activation, it may be a `JoinedGate`."""
        return DenseLinear(weight)

    def head(self, weight: Tensor) -> BaseLinear:
        """The product of the head, whose weight may be that of the embedding."""
        return self.linear(weight)

    def table(self, weight: Tensor) -> Tensor:
        """A table `[vocabulary, width]` as it is kept, with the same values."""
        return weight

    def reads_codes(self, weight: CodedWeight) -> bool:
        """Whether products read the codes; otherwise the weight is dequantised once."""
        return False

    def reads_expert_codes(self, weight: CodedWeight) -> bool:
        """Whether products of experts can read the weight's codes."""
        return self.reads_codes(weight)

    def coded_linear(
        self, weight: CodedWeight, dtype: torch.dtype, activation: Activation | None = None
    ) -> BaseLinear:
        """`linear` for a weight in codes, for inputs of a dtype."""
        return self.linear(weight.dequantised().to(dtype), activation)

    def add_lora(self) -> AddLora:
        """The low-rank update, and rows of weights that adapters replace."""
        return portable.add_lora

    def add_lora_embedding(self) -> AddLora:
        """The same at the embedding, for int64 token ids `[T]` in place of x."""
        return portable.add_lora_embedding

    def norm(self, site_id: int, weight: NormWeight) -> Norm:
        """A root-mean-square norm."""
        return RmsNorm(site_id, weight)

    def gate(self, activation: Activation) -> Gate:
        """act(first half) * second half."""
        return plain_gate(activation)

    def gated(self, activation: str) -> Gated:
        """act(a) * b."""
        return plain_gated(activation)

    def expert_linear(self, weight: Tensor) -> BaseLinear:
        """The product of one expert; its weight is a part of `ExpertWeights`."""
        return self.linear(weight)

    def experts(
        self,
        weights: ExpertWeights | None,
        num_active: int,
        activation: Activation,
        experts: Sequence[Expert],
    ) -> ExpertMlps:
        """The routed experts of a layer.

        Args:
            weights: None if each expert has weights of its own, in codes.
            activation: of their gates.
            experts: made of `expert_linear` of these weights.
        """
        return LoopedExperts(experts, plain_gate(activation))

    def delta_net(
        self, config: RecurrenceConfig, state_index: int, weights: DeltaWeights
    ) -> DeltaNet:
        """The gated delta net of a layer; `state_index`: its number among the recurrent layers."""
        return TorchDeltaNet(config, state_index, weights)
