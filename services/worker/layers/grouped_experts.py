"""The experts of a layer as grouped products on a GPU: nothing waits for the device, so a CUDA
graph can hold them."""

from __future__ import annotations

from torch import Tensor

from loraplex_services.worker.layers.mlp import Gate
from loraplex_services.worker.layers.moe import LoopedExperts
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
        self, gate_up: Tensor, down: Tensor, num_active: int, gate: Gate, looped: LoopedExperts
    ) -> None:
        """Compiles every tiling, so that none is compiled while requests wait.

        Args:
            gate_up: `[experts, 2 * intermediate, hidden]`, contiguous.
            down: `[experts, hidden, intermediate]`, contiguous.
            looped: over views of the same weights.
        """
        self._gate_up = gate_up
        self._down = down
        self._gate = gate
        self._looped = looped
        self._sites = frozenset(
            linear.site_id for expert in looped.experts for linear in (expert.gate_up, expert.down)
        )
        x = gate_up.new_zeros(1, gate_up.shape[2])
        chosen = gate_up.new_zeros(1, num_active).long()
        weights = chosen.float()
        for tiling in tilings(gate_up.dtype):
            self._multiply(x, chosen, weights, tiling)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """See ExpertMlps."""
        if self._has_adapters(lora):
            return self._looped.forward(x, chosen, weights, lora)
        tiling = tiling_for(chosen.numel(), len(self._gate_up), x.dtype)
        return self._multiply(x, chosen, weights, tiling)

    def _multiply(
        self, x: Tensor, chosen: Tensor, weights: Tensor, tiling: GroupedTiling
    ) -> Tensor:
        pairs = sort_pairs(chosen, len(self._gate_up))
        inner = self._gate(grouped_linear(x, self._gate_up, pairs, tiling, of_tokens=True))
        y = grouped_linear(inner, self._down, pairs, tiling, of_tokens=False)
        return combine(y, weights)

    def _has_adapters(self, lora: LoraBatch) -> bool:
        """Whether some adapter of the step is on an expert of this layer."""
        slots = {run.slot for run in lora.runs}
        if lora.tables is None:
            return any((slot, site) in lora.table for slot in slots for site in self._sites)
        return any(not self._sites.isdisjoint(lora.tables.in_torch(slot)) for slot in slots)
