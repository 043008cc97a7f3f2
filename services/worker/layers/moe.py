"""Sparse MLP: a router sends each token to a few experts, beside an optional shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.lora_linear import LoraLinear
from services.worker.layers.mlp import ACTIVATIONS, GatedMlp
from services.worker.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Expert:
    """Weights of one expert."""

    gate_up: LoraLinear
    """`[2 * intermediate, hidden]`, gate first."""
    down: LoraLinear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP for every token, scaled by a sigmoid of its own."""

    mlp: GatedMlp
    gate: LoraLinear


class SparseMlp:
    """sum over a token's best experts of weight * expert(x); weights are a float32 softmax."""

    def __init__(
        self,
        router: LoraLinear,
        experts: Sequence[Expert],
        num_active: int,
        renormalise: bool,
        activation: str,
        shared: SharedExpert | None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_active = num_active
        self._renormalise = renormalise
        self._activate = ACTIVATIONS[activation]
        self._shared = shared

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        probs = self._router.forward(x, batch.lora).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probs.topk(self._num_active, dim=-1)
        if self._renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            lora = batch.lora.select(rows.tolist()) if batch.lora.runs else batch.lora
            update = self._run(self._experts[number], x[rows], lora) * weights[rows, ranks, None]
            out.index_add_(0, rows, update.to(out.dtype))
        if self._shared is not None:
            gate = self._shared.gate.forward(x, batch.lora).sigmoid()
            out += gate * self._shared.mlp.forward(x, batch)
        return out

    def _run(self, expert: Expert, x: Tensor, lora: LoraBatch) -> Tensor:
        gate, up = expert.gate_up.forward(x, lora).chunk(2, dim=-1)
        return expert.down.forward(self._activate(gate) * up, lora)
