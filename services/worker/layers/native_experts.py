"""The experts of a layer in compiled kernels: which ones, and all their products, in two calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import Expert
from loraplex_services.worker.native.bindings import DTYPE_CODES, Native, row_stride
from loraplex_services.worker.ops.linear.cpu import PackedLinear, TiledLinear
from loraplex_services.worker.ops.lora.worklist import LoraBatch


def choose_experts(
    native: Native, scores: Tensor, num_active: int, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """See `ops.moe.torch.choose_experts`; of equal weights, those of the first experts win."""
    num_rows, num_experts = scores.shape
    chosen = torch.empty(num_rows, num_active, dtype=torch.int64)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32)
    native.kernel("choose_experts")(
        scores.data_ptr(),
        row_stride(scores),
        DTYPE_CODES[scores.dtype],
        num_rows,
        num_experts,
        num_active,
        renormalise,
        chosen.data_ptr(),
        weights.data_ptr(),
    )
    return chosen, weights


class NativeExperts:
    """Implements `moe.ExpertMlps`: experts without biases, gated by silu or gelu."""

    def __init__(self, native: Native, experts: Sequence[Expert], uses_gelu: bool) -> None:
        """`uses_gelu`: gates are gelu by its tanh formula instead of silu."""
        self.experts = experts
        self._native = native
        self._uses_gelu = uses_gelu
        words = [(*_words(expert.gate_up), *_words(expert.down)) for expert in experts]
        self._words = torch.tensor(words, dtype=torch.int64)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, lora: LoraBatch) -> Tensor:
        """See ExpertMlps."""
        y = torch.empty(x.shape, dtype=x.dtype)
        runs = lora.packed_runs if lora.runs else None
        self._native.kernel("experts")(
            x.data_ptr(),
            row_stride(x),
            chosen.data_ptr(),
            weights.data_ptr(),
            chosen.shape[1],
            self._words.data_ptr(),
            len(self.experts),
            x.shape[1],
            self.experts[0].down.base.in_features,
            self._uses_gelu,
            y.data_ptr(),
            row_stride(y),
            DTYPE_CODES[x.dtype],
            len(x),
            None if runs is None else runs.data_ptr(),
            0 if runs is None else len(runs),
        )
        return y


def _words(linear: LoraLinear) -> tuple[int, int, int]:
    """A site as the kernel reads it."""
    base = linear.base
    assert isinstance(base, PackedLinear | TiledLinear), base
    return (*base.words, linear.site_id)
