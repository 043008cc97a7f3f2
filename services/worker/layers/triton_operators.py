"""The operators of layers over Triton kernels: any dtype on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.layers.grouped_experts import GroupedExperts
from loraplex_services.worker.layers.moe import (
    Expert,
    ExpertMlps,
    ExpertWeights,
    LoopedExperts,
)
from loraplex_services.worker.layers.operators import AddLora, Operators
from loraplex_services.worker.ops.activation.torch import Activation, Gate, plain_gate
from loraplex_services.worker.ops.activation.triton import silu_and_multiply
from loraplex_services.worker.ops.attention.triton_backend import triton_attention
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.linear.triton import TritonCodedLinear, is_readable
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight, RmsNorm
from loraplex_services.worker.ops.norm.triton import add_rms_norm
from loraplex_services.worker.ops.recurrence.backend import DeltaNet, DeltaWeights
from loraplex_services.worker.ops.recurrence.triton import TritonDeltaNet
from loraplex_services.worker.ops.sampling.triton import argmax, draw
from loraplex_services.worker.ops.sampling.truncation import truncate
from loraplex_services.worker.sampling.drawing import DrawOperators
from loraplex_services.worker.types.model_config import RecurrenceConfig


class TritonOperators(Operators):
    """The operators of torch, where no kernel takes their place; `lora` is set once the arena is
    there."""

    name = "triton"
    draws = DrawOperators(truncate, draw, argmax)

    def __init__(self) -> None:
        super().__init__()
        self.lora: DeviceLora | None = None
        self.attention_maker = triton_attention()

    def add_lora(self) -> AddLora:
        """See Operators."""
        return TritonLora(self)

    def reads_codes(self, weight: CodedWeight) -> bool:
        """See Operators."""
        return is_readable(weight)

    def reads_expert_codes(self, weight: CodedWeight) -> bool:
        """False: products of all experts in one launch read plain weights."""
        return False

    def coded_linear(
        self, weight: CodedWeight, dtype: torch.dtype, activation: Activation | None = None
    ) -> BaseLinear:
        """See Operators."""
        if is_readable(weight):
            return TritonCodedLinear(weight)
        return super().coded_linear(weight, dtype, activation)

    def norm(self, site_id: int, weight: NormWeight) -> Norm:
        """See Operators."""
        return TritonNorm(site_id, weight)

    def gate(self, activation: Activation) -> Gate:
        """See Operators."""
        return silu_and_multiply if activation == "silu" else super().gate(activation)

    def experts(
        self,
        weights: ExpertWeights | None,
        num_active: int,
        activation: Activation,
        experts: Sequence[Expert],
    ) -> ExpertMlps:
        """See Operators."""
        looped = LoopedExperts(experts, plain_gate(activation))
        if weights is None:
            return looped
        return GroupedExperts(weights, num_active, self.gate(activation), looped)

    def delta_net(
        self, config: RecurrenceConfig, state_index: int, weights: DeltaWeights
    ) -> DeltaNet:
        """See Operators."""
        return TritonDeltaNet(config, state_index, weights)


class TritonLora:
    """The low-rank update of a site; implements `JoinedUpdate`."""

    def __init__(self, operators: TritonOperators) -> None:
        self._operators = operators

    def product(self, base: BaseLinear, x: Tensor, site_id: int, lora: LoraBatch) -> Tensor:
        """See `JoinedUpdate`."""
        if not lora.may_act or lora.replaces_rows(site_id):
            y = base.apply(x)
            self(y, x, site_id, lora)
            return y
        lora.await_site(site_id)
        return self._kernels.product(base, x, site_id, lora)

    def __call__(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `ops/lora`."""
        if not lora.may_act:
            return
        lora.await_site(site_id)
        if lora.replaces_rows(site_id):
            portable.add_lora(y, x, site_id, lora)
        else:
            self._kernels.add_lora(y, x, site_id, lora)

    @property
    def _kernels(self) -> DeviceLora:
        assert self._operators.lora is not None, "the runner sets it before the first step"
        return self._operators.lora


class TritonNorm(RmsNorm):
    """A norm in one launch; batches whose adapters train norms use torch."""

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        if lora.trains_norms:
            return super().forward(x, lora, update)
        rows = x.reshape(-1, x.shape[-1])
        if update is None:
            rows = rows.contiguous()  # the only head of a layer may lie apart
        y = add_rms_norm(rows, update, self.weight, self._eps, self._in_float32)
        return y.view(x.shape)
