"""Sends Falcon's attention to the paged cache.

The library's class for Falcon does not use the registry of attention functions. It takes a class of
attention layers for each implementation instead, and this file adds one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from loraplex.errors import Unsupported
from loraplex_services.worker.layers.library_modules import ATTENTION, attend


def add_falcon_attention(config: Any) -> None:
    """Make the library's Falcon classes that are built from now on use the paged cache.

    Raises:
        Unsupported: for ALiBi, which attention backends do not compute.
    """
    if config.alibi:
        why = "is not served: attention backends add no biases to scores; use a base with RoPE"
        raise Unsupported.field("config.json:alibi", True, why)
    falcon: Any = import_module("transformers.models.falcon.modeling_falcon")

    class PagedFalconAttention(falcon.FalconAttention):  # type: ignore[misc]
        """An attention layer without its own cache."""

        def forward(
            self,
            hidden_states: Tensor,
            *_unused: Any,
            position_embeddings: tuple[Tensor, Tensor],
            **_others: Any,
        ) -> tuple[Tensor, None]:
            """`[1, T, H]` -> `[1, T, H]`."""
            fused = self.query_key_value(hidden_states)
            # The query heads of a KV head come before its key and its value.
            is_grouped = self.new_decoder_architecture or self.multi_query
            num_kv_heads = self.num_kv_heads if is_grouped else self.num_heads
            num_shared = self.num_heads // num_kv_heads
            heads = fused.unflatten(-1, (num_kv_heads, num_shared + 2, self.head_dim))
            q, k, v = heads.split((num_shared, 1, 1), dim=-2)
            q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
            q, k = falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
            out, _ = attend(self, q, k, v, None)
            return self.dense(out.flatten(2)), None

    falcon.FALCON_ATTENTION_CLASSES[ATTENTION] = PagedFalconAttention
