"""The experts of a layer as grouped products on a GPU, without waiting for the device, so that a
CUDA graph can contain them.
"""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.layers.moe import ExpertWeights, LoopedExperts
from loraplex_services.worker.ops.activation.torch import Gate
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe.pairs import sort_pairs
from loraplex_services.worker.ops.moe.triton import (
    GroupedTiling,
    combine,
    grouped_linear,
    tiling_for,
    tilings,
)


class GroupedExperts:
    """Implements `moe.ExpertMlps`. Steps with adapters on this layer's experts are computed one
    expert after the other, which waits for the device; graphs never hold such steps."""

    def __init__(
        self, weights: ExpertWeights, num_active: int, gate: Gate, looped: LoopedExperts
    ) -> None:
        """Compiles every tiling, so that none is compiled while requests wait.

        Args:
            looped: over views of the same weights.
        """
        self._weights = weights
        self._gate = gate
        self._looped = looped
        self._sites = frozenset(
            linear.site_id for expert in looped.experts for linear in (expert.gate_up, expert.down)
        )
        x = weights.gate_up.new_zeros(1, weights.gate_up.shape[2])
        chosen = weights.gate_up.new_zeros(1, num_active).long()
        for tiling in tilings(x.dtype):
            self._multiply(x, chosen, chosen.float(), tiling)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """See ExpertMlps."""
        if self._has_adapters(lora):
            return self._looped.forward(x, chosen, weights, lora)
        tiling = tiling_for(chosen.numel(), len(self._weights.gate_up), x.dtype)
        return self._multiply(x, chosen, weights, tiling)

    def _multiply(
        self, x: Tensor, chosen: Tensor, weights: Tensor, tiling: GroupedTiling
    ) -> Tensor:
        own, experts = self._weights, chosen.flatten()
        pairs = sort_pairs(chosen, len(own.gate_up))
        inner = grouped_linear(x, own.gate_up, pairs, tiling, of_tokens=True)
        if own.gate_up_bias is not None:
            inner += own.gate_up_bias[experts[pairs.order]]
        inner = self._gate(inner).contiguous()
        y = grouped_linear(inner, own.down, pairs, tiling, of_tokens=False)
        if own.down_bias is not None:
            y += own.down_bias[experts]
        return combine(y, weights)

    def _has_adapters(self, lora: LoraBatch) -> bool:
        """Whether some adapter of the step is on an expert of this layer."""
        slots = {run.slot for run in lora.runs}
        if lora.tables is None:
            return any((slot, site) in lora.table for slot in slots for site in self._sites)
        return any(not self._sites.isdisjoint(lora.tables.entered(slot).in_torch) for slot in slots)
