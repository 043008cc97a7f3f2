"""Layers' pieces over Triton kernels: any dtype on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from services.worker.attention.backend import AttentionBackend, AttentionMetadata
from services.worker.attention.triton import TritonAttention, TritonAttentionMetadata
from services.worker.kernels.lora import torch as portable
from services.worker.kernels.lora.triton import DeviceLora
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.kernels.norm.triton import add_rms_norm
from services.worker.kernels.sampling.triton import draw
from services.worker.kernels.silu.triton import silu_and_multiply
from services.worker.layers.linear import BaseLinear
from services.worker.layers.mlp import Gate
from services.worker.layers.norm import Norm, NormWeight, RmsNorm
from services.worker.layers.operators import AddLora, TorchOperators
from services.worker.layers.rotary import Rotate
from services.worker.model.config import ModelConfig
from services.worker.sampling.drawing import DrawOperators
from services.worker.sampling.masks import truncate


class TritonOperators:
    """Implements `operators.Operators`; `lora` is set once the arena is there."""

    name = "triton"
    make_metadata: Callable[..., AttentionMetadata] = TritonAttentionMetadata
    rotate: Rotate = TorchOperators.rotate
    draws = DrawOperators(truncate, draw)

    def __init__(self) -> None:
        self.lora: DeviceLora | None = None
        self._torch = TorchOperators()

    def linear(self, weight: Tensor) -> BaseLinear:
        """See Operators."""
        return self._torch.linear(weight)

    def add_lora(self) -> AddLora:
        """See Operators."""
        return TritonLora(self)

    def norm(self, site_id: int, weight: NormWeight) -> Norm:
        """See Operators."""
        return TritonNorm(site_id, weight)

    def gate(self, activation: str) -> Gate:
        """See Operators."""
        return silu_and_multiply if activation == "silu" else self._torch.gate(activation)

    def attention(self, config: ModelConfig, layer: int) -> AttentionBackend:
        """See Operators."""
        return TritonAttention(
            layer,
            config.num_heads,
            config.head_dim,
            config.num_kv_heads,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=config.windows[layer],
        )


class TritonLora:
    """The low-rank update of a site; implements `EarlyUpdate`."""

    def __init__(self, operators: TritonOperators) -> None:
        self._operators = operators

    def start(self, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `DeviceLora.start`."""
        if lora.works and not lora.replaces_rows(site_id):
            lora.await_site(site_id)
            self._kernels.start(x, site_id, lora)

    def __call__(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `kernels/lora`."""
        if not lora.works and not lora.runs:
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


class TritonNorm:
    """A norm in one launch; batches whose adapters train norms take the torch way."""

    def __init__(self, site_id: int, weight: NormWeight) -> None:
        self._portable = RmsNorm(site_id, weight)
        self._eps = weight.eps
        self._in_float32 = weight.in_float32

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        if lora.trains_norms:
            return self._portable.forward(x, lora, update)
        rows = x.reshape(-1, x.shape[-1])
        y = add_rms_norm(rows, update, self._portable.weight, self._eps, self._in_float32)
        return y.view(x.shape)
