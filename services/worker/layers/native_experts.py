"""The experts of a layer in compiled kernels: which ones, and all their products, in two calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import Expert
from loraplex_services.worker.native.bindings import Native, row_stride
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.ops.activation.torch import GELU_TANH, Activation
from loraplex_services.worker.ops.linear.cpu import (
    CodedLinear,
    FixedLinear,
    PackedLinear,
    TiledLinear,
)
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.types.model_config import ClampedSwiglu

CLAMPED = -1
"""Stands for `ClampedSwiglu` (`native/src/experts.cpp`)."""


def choose_experts(
    native: Native,
    scores: Tensor,
    num_active: int,
    renormalise: bool,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `ops.moe.torch.choose_experts`; of equal weights, those of the first experts win."""
    num_rows, num_experts = scores.shape
    chosen = torch.empty(num_rows, num_active, dtype=torch.int64)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32)
    rows = scores, row_stride(scores), scores.dtype, num_rows, num_experts
    native.call("choose_experts", *rows, num_active, renormalise, factors, chosen, weights)
    return chosen, weights


def operation_of(activation: Activation | None) -> Operation | None:
    """The operation act(a) * b; None if there is no kernel of it."""
    if not isinstance(activation, str):
        return None
    if activation in GELU_TANH:
        return Operation.GELU_TANH
    return {"silu": Operation.SILU, "sigmoid": Operation.SIGMOID}.get(activation)


@dataclass(frozen=True, slots=True)
class NativeGate:
    """The gate of experts as the kernel reads it."""

    operation: int
    alpha: float = 0.0
    limit: float = 0.0

    @classmethod
    def of(cls, activation: Activation) -> NativeGate | None:
        """None if there is no kernel of it."""
        if isinstance(activation, ClampedSwiglu):
            return cls(CLAMPED, activation.alpha, activation.limit)
        operation = operation_of(activation)
        return None if operation is None else cls(operation)


def are_readable(experts: Sequence[Expert]) -> bool:
    """Whether the kernel reads all weights."""
    linears = chain.from_iterable((expert.gate_up, expert.down) for expert in experts)
    return all(_words_of(linear.base) is not None for linear in linears)


class NativeExperts:
    """Implements `moe.ExpertMlps`."""

    def __init__(self, native: Native, experts: Sequence[Expert], gate: NativeGate) -> None:
        """See `Operators.experts`."""
        self.experts = experts
        self._native = native
        self._gate = gate
        words = [(*_words(expert.gate_up), *_words(expert.down)) for expert in experts]
        self._words = torch.tensor(words, dtype=torch.int64)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """See ExpertMlps."""
        y = torch.empty(x.shape, dtype=x.dtype)
        widths = x.shape[1], self.experts[0].down.base.in_features
        gate = self._gate.operation, self._gate.alpha, self._gate.limit
        runs = (lora.packed_runs, len(lora.packed_runs)) if lora.runs else (None, 0)
        self._native.call(
            "experts",
            *(x, row_stride(x), chosen, weights, chosen.shape[1]),
            *(self._words, len(self.experts), *widths, *gate),
            *(y, row_stride(y), x.dtype, len(x), *runs),
        )
        return y


def _words(linear: LoraLinear) -> tuple[int, int, int, int]:
    """A site as the kernel reads it."""
    words, bias = _words_of(linear.base), linear.bias
    assert words is not None, linear.base
    return (*words, linear.site_id, 0 if bias is None else bias.data_ptr())


def _words_of(base: BaseLinear) -> tuple[int, int] | None:
    """See `PackedLinear.words`; None = the kernel cannot read the weight."""
    readable = PackedLinear | TiledLinear | FixedLinear | CodedLinear
    return base.words if isinstance(base, readable) else None
