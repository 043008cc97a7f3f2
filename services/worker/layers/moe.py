"""Sparse MLP: a router sends each token to a few experts and to an optional shared one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.mlp import GatedMlp
from loraplex_services.worker.ops.activation.torch import Gate, Gated
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe.pairs import sort_pairs
from loraplex_services.worker.ops.moe.torch import ChooseExperts


@dataclass(frozen=True, slots=True)
class Expert:
    """Weights of one expert."""

    gate_up: LoraLinear
    """`[2 * intermediate, hidden]`."""
    down: LoraLinear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts of a layer, contiguous."""

    gate_up: Tensor
    """`[experts, 2 * intermediate, hidden]`."""
    down: Tensor
    """`[experts, hidden, intermediate]`."""
    gate_up_bias: Tensor | None = None
    """`[experts, 2 * intermediate]`."""
    down_bias: Tensor | None = None
    """`[experts, hidden]`."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP for every token, scaled by a sigmoid of its own."""

    mlp: GatedMlp
    gate: LoraLinear
    gated: Gated
    """Multiplies by the sigmoid of the gate."""

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        gate = self.gate.forward(x, batch.lora)
        return self.gated(gate, self.mlp.forward(x, batch))


class ExpertMlps(Protocol):
    """The routed experts of a layer."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """sum over r of weights[t, r] * expert chosen[t, r] of x[t]: `[T, H]` -> `[T, H]`.

        Args:
            chosen: int64 `[T, k]`, expert numbers.
            weights: float32 `[T, k]`.
        """
        ...


class LoopedExperts:
    """Computes one expert after another over the rows that were routed to it, on any device and
    with adapters on experts. The host reads the chosen experts from the device once."""

    def __init__(self, experts: Sequence[Expert], gate: Gate) -> None:
        self.experts = experts
        self._gate = gate

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """See ExpertMlps."""
        pairs = sort_pairs(chosen, len(self.experts))
        tokens = pairs.order // pairs.num_active
        ordered_weights = weights.flatten().index_select(0, pairs.order)
        ends, known_tokens = pairs.ends.tolist(), tokens.tolist() if lora.runs else []
        out, begin = torch.zeros_like(x), 0
        for expert, end in zip(self.experts, ends, strict=True):
            if begin < end:
                rows = tokens[begin:end]
                selected = lora.select(known_tokens[begin:end]) if lora.runs else lora
                y = self._run(expert, x.index_select(0, rows), selected)
                out.index_add_(0, rows, (y * ordered_weights[begin:end, None]).to(out.dtype))
            begin = end
        return out

    def _run(self, expert: Expert, x: Tensor, lora: LoraBatch) -> Tensor:
        return expert.down.forward(self._gate(expert.gate_up.forward(x, lora)), lora)


@dataclass(frozen=True, slots=True, eq=False)
class SparseMlp:
    """The experts that a router chooses for each token, with a float32 softmax for weights."""

    layer: int
    router: LoraLinear
    experts: ExpertMlps
    num_active: int
    renormalise: bool
    shared: SharedExpert | None
    sum_ranks: Callable[[Tensor], Tensor]
    """The inner width of all experts may be divided among ranks, whose outputs are summed once for
    the layer."""
    choose_experts: ChooseExperts

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        scores = self.router.forward(x, batch.lora)
        chosen, weights = self.choose_experts(scores, self.num_active, self.renormalise, None)
        if batch.routing is not None:
            batch.routing.add(self.layer, chosen)
        out = self.experts.forward(x, chosen, weights, batch.lora)
        if self.shared is not None:
            out += self.shared.forward(x, batch)
        return self.sum_ranks(out)
