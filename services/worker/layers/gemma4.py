"""The layers of Gemma 4, which differ from those of all other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_services.worker.layers.attention import normed_heads
from loraplex_services.worker.layers.embedding import TokenTable
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.mlp import GatedMlp
from loraplex_services.worker.layers.moe import ExpertMlps
from loraplex_services.worker.ops.activation.torch import Gated
from loraplex_services.worker.ops.attention.backend import AttentionBackend
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe.torch import ChooseExperts
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.rope.torch import CosSin, Rotate


class Gemma4Attention:
    """Attention whose keys and values may be another layer's, and whose values may be its keys.

    A layer that reads another's hands the same keys and values to a backend of that layer, which
    writes them to the same places again. So every backend serves it, and the cache has one copy.
    """

    def __init__(
        self,
        shared: int | None,
        qkv: LoraLinear,
        o: LoraLinear,
        backend: AttentionBackend,
        norms: tuple[Norm, Norm | None, Norm],
        rotate: Rotate,
    ) -> None:
        """See `forward`.

        Args:
            shared: the layer whose keys and values this one and others read, which may be this one;
                None = no other layer reads the same.
            qkv: queries, and for a layer with keys of its own also keys, and values unless the
                keys serve as values.
            backend: of the layer whose keys are read, which has heads of the same number and width;
                queries and keys come rotated.
            norms: of each query, key and value head; no key norm if another layer's keys are read.
        """
        self._shared = shared
        self._qkv = qkv
        self._o = o
        self._backend = backend
        shape = backend.shape
        self._q_size, self._kv_size, self._head_dim = shape.q_size, shape.kv_size, shape.head_dim
        self._q_norm, self._k_norm, self._v_norm = norms
        self._rotate = rotate

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        lora, head_dim = batch.lora, self._head_dim
        y = self._qkv.forward(x, lora)
        q, others = y[:, : self._q_size], y[:, self._q_size :]
        q = self._rotate(normed_heads(q, self._q_norm, head_dim, lora), cos_sin, head_dim)
        if self._k_norm is None:
            assert self._shared is not None, "without keys of its own, it reads another layer's"
            k, v = batch.shared_kv[self._shared]
        else:
            k, v = others[:, : self._kv_size], others[:, -self._kv_size :]
            v = normed_heads(v, self._v_norm, head_dim, lora)
            k = self._rotate(normed_heads(k, self._k_norm, head_dim, lora), cos_sin, head_dim)
            if self._shared is not None:
                batch.shared_kv[self._shared] = k, v
        attended = self._backend.forward(q, k, v, batch.attention)
        return self._o.forward(attended, lora)


@dataclass(frozen=True, slots=True)
class Gemma4Router:
    """Chooses experts for the residual stream."""

    norm: Norm
    scale: Tensor
    """`[H]`."""
    projection: LoraLinear
    expert_scale: Tensor
    """float32 `[experts]`."""
    num_active: int
    choose_experts: ChooseExperts

    def forward(self, x: Tensor, lora: LoraBatch) -> tuple[Tensor, Tensor]:
        """`[T, H]` -> chosen experts, int64 `[T, k]`, and their weights, float32 `[T, k]`."""
        scaled = self.norm.forward(x, lora) * self.scale * x.shape[-1] ** -0.5
        scores = self.projection.forward(scaled, lora)
        return self.choose_experts(scores, self.num_active, True, self.expert_scale)


@dataclass(frozen=True, slots=True)
class SideExperts:
    """Experts that compute next to the MLP, from the residual stream."""

    layer: int
    router: Gemma4Router
    experts: ExpertMlps
    mlp_norm: Norm
    """Applied to the output of the MLP before that of the experts is added."""
    norms: tuple[Norm, Norm]
    """Before and after the experts."""
    sum_ranks: Callable[[Tensor], Tensor]
    """The inner width of the experts may be divided among ranks, whose outputs are summed."""

    def add(self, y: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The sum of both outputs. `y` is that of the MLP, `x` the residual stream: `[T, H]`."""
        lora = batch.lora
        chosen, weights = self.router.forward(x, lora)
        if batch.routing is not None:
            batch.routing.add(self.layer, chosen)
        own = self.experts.forward(self.norms[0].forward(x, lora), chosen, weights, lora)
        summed = self.sum_ranks(own)
        return self.mlp_norm.forward(y, lora) + self.norms[1].forward(summed, lora)


@dataclass(frozen=True, slots=True)
class Gemma4Feed:
    """The MLP, with or without experts."""

    mlp: GatedMlp
    experts: SideExperts | None

    def forward(self, normed: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The update of the residual stream `x`, `[T, H]`, before another norm."""
        y = self.mlp.forward(normed, batch)
        return y if self.experts is None else self.experts.add(y, x, batch)


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """The input of each layer: rows of a table, added to a projection of the embedding."""

    table: TokenTable
    """Its rows have the inputs of all layers, `[layers * width]`."""
    projection: LoraLinear
    norm: Norm
    """The norm of one layer's part."""
    width: int
    """The width of one layer's part."""

    def forward(self, token_ids: Tensor, embedded: Tensor, lora: LoraBatch) -> Tensor:
        """int64 `[T]` and `[T, H]` -> `[T, layers, width]`."""
        projected = self.projection.forward(embedded, lora) * embedded.shape[-1] ** -0.5
        parts = self.norm.forward(projected.view(len(embedded), -1, self.width), lora)
        rows = self.table.look_up(token_ids)
        own = rows * torch.tensor(self.width**0.5, dtype=rows.dtype)
        both: Tensor = (parts + own.view(parts.shape)) * 2.0**-0.5
        return both


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds a layer's own input to the residual stream."""

    gate: LoraLinear
    projection: LoraLinear
    norm: Norm
    gated: Gated
    """Multiplies by the activation of the gate."""

    def forward(self, x: Tensor, own: Tensor, lora: LoraBatch) -> Tensor:
        """The update of `x`, `[T, H]`; `own`: `[T, width]`."""
        gated = self.gated(self.gate.forward(x, lora), own)
        return self.norm.forward(self.projection.forward(gated, lora), lora)


@dataclass(frozen=True, slots=True, eq=False)
class Gemma4Layer:
    """Implements `model.decoder.Layer`."""

    layer: int
    attention: Gemma4Attention
    feed: Gemma4Feed
    attention_norms: tuple[Norm, Norm]
    """Before and after."""
    feed_norms: tuple[Norm, Norm]
    own_input: LayerInput | None
    scalar: Tensor
    """`[1]`; multiplies the stream at the end."""

    def forward(
        self, x: Tensor, update: Tensor | None, cos_sin: CosSin, batch: ForwardBatch
    ) -> None:
        """See `Layer`; nothing is left to add."""
        assert update is None, "no layer before this one leaves anything to add"
        lora = batch.lora
        attended = self.attention.forward(self.attention_norms[0].forward(x, lora), cos_sin, batch)
        attended = self.attention_norms[1].forward(attended, lora)
        normed = self.feed_norms[0].forward(x, lora, attended)
        x += self.feed_norms[1].forward(self.feed.forward(normed, x, batch), lora)
        if self.own_input is not None:
            assert batch.layer_inputs is not None, "set before the first layer"
            x += self.own_input.forward(x, batch.layer_inputs[:, self.layer], lora)
        x *= self.scalar
