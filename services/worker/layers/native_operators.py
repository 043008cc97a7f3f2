"""The operators of layers over the compiled kernels: float32 or bfloat16 on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from loraplex_services.worker.layers.moe import Expert, ExpertMlps, ExpertWeights
from loraplex_services.worker.layers.native_experts import (
    NativeExperts,
    NativeGate,
    are_readable,
    choose_experts,
    operation_of,
)
from loraplex_services.worker.layers.operators import AddLora, Operators
from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.isa import AMX
from loraplex_services.worker.ops.activation.torch import Activation, Gate, Gated, stacked_gate
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.cpu import NativeAttention
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.cpu import (
    CodedGate,
    CodedLinear,
    FixedLinear,
    GateLinear,
    PackedLinear,
    PlainLinear,
    TiledLinear,
    are_joined,
    as_published,
    is_readable,
)
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.lora.cpu import NativeLora
from loraplex_services.worker.ops.norm.cpu import NativeNorm
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight
from loraplex_services.worker.ops.recurrence.backend import DeltaNet, DeltaWeights
from loraplex_services.worker.ops.recurrence.cpu import NativeDeltaNet
from loraplex_services.worker.ops.rope.torch import CosSin
from loraplex_services.worker.sampling.drawing import DrawOperators, first_argmax
from loraplex_services.worker.types.model_config import ClampedSwiglu, RecurrenceConfig


class NativeOperators(Operators):
    """Compiled kernels, except for the gates of rare activations."""

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        super().__init__()
        self._in_tiles = dtype is torch.bfloat16 and native.prefers_tiles
        self._on_amx = self._in_tiles and native.isa == AMX
        self._in_fixed = dtype is torch.bfloat16 and native.has_fixed
        has_choice = dtype is torch.bfloat16 and native.has_tiles and native.isa != AMX
        widens = has_choice and not native.uses_pairs
        self.name = f"native-{native.isa}" + "-widened" * widens + "-fixed" * self._in_fixed
        self.native = native
        self.keeps_half = dtype is torch.float32
        self.loops_experts = False
        """Whether torch computes the experts of a layer, because no kernel reads their weights."""
        self.attention_maker = AttentionMaker(
            NativeAttention,
            layer_fields={"native": native},
            metadata_fields={"task_queries": native.task_queries},
        )
        self.choose_experts = partial(choose_experts, native)
        self.draws = DrawOperators(native.truncate, native.draw, first_argmax)

    def rotate(self, x: Tensor, cos_sin: CosSin, head_dim: int) -> Tensor:
        """Rotate x in place, and return it."""
        self.native.rotate(x, *cos_sin, head_dim)
        return x

    def linear(self, weight: Tensor, activation: Activation | None = None) -> BaseLinear:
        """See Operators."""
        operation = operation_of(activation)
        if self._on_amx and operation is not None and are_joined(len(weight), operation):
            return GateLinear(self.native, weight, operation)
        if self._in_tiles:
            return TiledLinear(self.native, weight)
        if self._in_fixed:
            return FixedLinear(self.native, weight)
        return PackedLinear(self.native, as_published(weight))

    def head(self, weight: Tensor) -> BaseLinear:
        """See Operators."""
        if self._on_amx and PlainLinear.fits(weight):
            return PlainLinear(self.native, weight)
        return self.linear(weight)

    def table(self, weight: Tensor) -> Tensor:
        """See Operators."""
        return as_published(weight)

    def reads_codes(self, weight: CodedWeight) -> bool:
        """See Operators."""
        return is_readable(weight)

    def coded_linear(
        self, weight: CodedWeight, dtype: torch.dtype, activation: Activation | None = None
    ) -> BaseLinear:
        """See Operators."""
        if not is_readable(weight):
            return super().coded_linear(weight, dtype, activation)
        operation = operation_of(activation)
        if operation is not None and are_joined(weight.out_features, operation):
            return CodedGate(self.native, weight, operation)
        return CodedLinear(self.native, weight)

    def add_lora(self) -> AddLora:
        """See Operators."""
        return NativeLora(self.native)

    def add_lora_embedding(self) -> AddLora:
        """See Operators."""
        return NativeLora(self.native).add_lora_embedding

    def norm(self, site_id: int, weight: NormWeight) -> Norm:
        """See Operators."""
        return NativeNorm(self.native, site_id, weight)

    def gate(self, activation: Activation) -> Gate:
        """See Operators."""
        if isinstance(activation, ClampedSwiglu):
            return super().gate(activation)
        return stacked_gate(self.gated(activation))

    def gated(self, activation: str) -> Gated:
        """See Operators."""
        operation = operation_of(activation)
        if operation is None:
            return super().gated(activation)
        return partial(self.native.elementwise, operation)

    def experts(
        self,
        weights: ExpertWeights | None,
        num_active: int,
        activation: Activation,
        experts: Sequence[Expert],
    ) -> ExpertMlps:
        """See Operators."""
        gate = NativeGate.of(activation)
        if gate is None or not are_readable(experts):
            self.loops_experts = True
            return super().experts(weights, num_active, activation, experts)
        return NativeExperts(self.native, experts, gate)

    def delta_net(
        self, config: RecurrenceConfig, state_index: int, weights: DeltaWeights
    ) -> DeltaNet:
        """See Operators."""
        return NativeDeltaNet(self.native, config, state_index, weights)
