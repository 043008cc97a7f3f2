"""Self-attention of one decoder layer: projections, head norms, rotary embedding, attention, output
projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.ops.activation.torch import Gated
from loraplex_services.worker.ops.attention.backend import AttentionBackend
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.rope.torch import CosSin, Rotate
from loraplex_services.worker.types.model_config import ModelConfig


class SelfAttention:
    """`qkv` and `o` sites around a backend."""

    def __init__(
        self,
        qkv: LoraLinear,
        o: LoraLinear,
        backend: AttentionBackend,
        head_norms: tuple[Norm, Norm] | None,
        rotate: Rotate,
        scales_queries: bool,
        gated: Gated | None,
    ) -> None:
        """See `forward`.

        Args:
            scales_queries: the batch has a factor for the queries of each row.
            gated: by sigmoid, if `qkv` has a gate after each query head, of the same width.
        """
        self._qkv = qkv
        self._o = o
        self._backend = backend
        self._backend_rotates = backend.pos_embd_params is not None
        shape = backend.shape
        self._q_size, self._kv_size, self._head_dim = shape.q_size, shape.kv_size, shape.head_dim
        self._head_norms = head_norms
        self._rotate = rotate
        self._scales_queries = scales_queries
        self._gated = gated
        are_final = head_norms is None and not scales_queries
        self._rotates_together = are_final and not self._backend_rotates
        changes_heads = head_norms is not None or scales_queries or gated is not None
        self._takes_fused = self._backend_rotates and not changes_heads

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        qkv = self._qkv.forward(x, batch.lora)
        if self._takes_fused:
            attended = self._backend.forward(qkv, None, None, batch.attention)
            return self._o.forward(attended, batch.lora)
        gates = None
        if self._gated is not None:
            qkv, gates = self._without_gates(qkv)
        heads, v = qkv.split((self._q_size + self._kv_size, self._kv_size), dim=-1)
        if self._rotates_together:
            heads = self._rotate(heads, cos_sin, self._head_dim)
        q, k = heads.split((self._q_size, self._kv_size), dim=-1)
        if self._head_norms is not None:
            q, k = (
                normed_heads(x, norm, self._head_dim, batch.lora)
                for x, norm in zip((q, k), self._head_norms, strict=True)
            )
        if self._scales_queries:
            assert batch.query_scales is not None, "set before the first layer"
            q = q * batch.query_scales
        if not (self._backend_rotates or self._rotates_together):
            q, k = (self._rotate(x, cos_sin, self._head_dim) for x in (q, k))
        attended = self._backend.forward(q, k, v, batch.attention)
        if self._gated is not None and gates is not None:
            attended = self._gated(gates, attended)
        return self._o.forward(attended, batch.lora)

    def _without_gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side, and the gates `[T, heads * D]`."""
        heads, others = x.split((2 * self._q_size, 2 * self._kv_size), dim=-1)
        pairs = heads.view(len(x), -1, 2, self._head_dim)
        return torch.cat((pairs[:, :, 0].flatten(1), others), dim=-1), pairs[:, :, 1].flatten(1)


def normed_heads(x: Tensor, norm: Norm, head_dim: int, lora: LoraBatch) -> Tensor:
    """Normalises each head separately; `[T, heads * D]`."""
    return norm.forward(x.view(len(x), -1, head_dim), lora).flatten(1)


def query_scales(config: ModelConfig, device: torch.device) -> Tensor | None:
    """The factor of the queries at each position, float32 `[positions, 1]`."""
    scale = config.query_scale
    if scale is None:
        return None
    positions = torch.arange(config.max_position_embeddings, device=device)
    num_contexts = (positions // scale.context_len).float()
    return (1 + scale.beta * torch.log1p(num_contexts))[:, None]
