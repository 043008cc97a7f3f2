"""Attention in C++: ragged, paged, contexts and generations alike.

`native/src/attention_tiles.cpp` in bfloat16 where the library has dot products of it,
`native/src/attention.cpp` elsewhere.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loraplex_services.worker.native.bindings import TILE_INPUTS, TILE_ROWS, Native, row_stride
from loraplex_services.worker.ops.attention.backend import AttentionMask, AttentionMetadata
from loraplex_services.worker.ops.attention.shapes import HeadShape


@dataclass(frozen=True, slots=True)
class GroupSequences:
    """One KV group's sequences as C++ reads them."""

    words: Tensor
    """int64 `[N, 4]`: first token row, number of tokens, first position, address of block ids."""
    block_ids: Tensor
    """int64: what the addresses point into."""


@dataclass(slots=True)
class NativeAttentionMetadata(AttentionMetadata):
    """Adds flat tables for each KV group."""

    task_queries: int = 1
    """`Native.task_queries`."""
    groups: tuple[GroupSequences, ...] = ()
    task_ends: Tensor | None = None
    """int64 `[N]`: attention tasks of sequences 0 to i, for each KV head."""

    def prepare(self) -> None:
        """Lay out the predefined fields."""
        params = self.kv_cache_params
        assert params.use_cache, "C++ attention needs a KV cache"
        lens: list[int] = self.seq_lens.tolist()
        counts = (-(-num // self.task_queries) for num in lens)
        self.task_ends = torch.tensor(list(accumulate(counts)), dtype=torch.int64)
        rows = list(accumulate(lens, initial=0))[:-1]
        starts = params.num_cached_tokens_per_seq
        self.groups = tuple(_flatten(rows, lens, starts, t) for t in params.block_tables)


def _flatten(
    rows: Sequence[int], lens: Sequence[int], starts: Sequence[int], tables: Sequence[Sequence[int]]
) -> GroupSequences:
    ids, offsets = array("q"), []
    for table in tables:
        offsets.append(len(ids))
        ids.extend(table)
    block_ids = torch.tensor(ids, dtype=torch.int64)
    begin = block_ids.data_ptr()
    addresses = [begin + offset * ids.itemsize for offset in offsets]
    words = torch.tensor([*zip(rows, lens, starts, addresses, strict=True)], dtype=torch.int64)
    return GroupSequences(words, block_ids)


class NativeAttention:
    """One layer."""

    def __init__(self, native: Native, layer_idx: int, shape: HeadShape) -> None:
        self._native = native
        self._layer = layer_idx
        self._shape = shape

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask = AttentionMask.CAUSAL,
    ) -> Tensor:
        """See `AttentionBackend.forward`; rows of q, k, v may lie apart."""
        assert isinstance(metadata, NativeAttentionMetadata), type(metadata)
        assert attention_mask is AttentionMask.CAUSAL, "a KV cache implies the causal mask"
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        cache = metadata.kv_cache_manager
        assert cache is not None and metadata.task_ends is not None
        planes = cache.planes(self._layer)
        group = metadata.groups[cache.group_of(self._layer)]
        layout = self._layout(q, k, v, planes[0], cache.tokens_per_block)
        if self._fits_tiles(q.dtype, cache.tokens_per_block):
            return self._native.attend_tiles(q, k, v, planes, layout, group.words)
        return self._native.attend(q, k, v, planes, layout, group.words, metadata.task_ends)

    def _fits_tiles(self, dtype: torch.dtype, block_tokens: int) -> bool:
        is_whole = self._shape.head_dim % TILE_INPUTS == 0 and block_tokens == TILE_ROWS
        return self._native.has_tiles and dtype is torch.bfloat16 and is_whole

    def _layout(self, q: Tensor, k: Tensor, v: Tensor, plane: Tensor, block_tokens: int) -> Tensor:
        shape = self._shape
        words = struct.pack(
            "9q2dq",
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            block_tokens,
            plane.stride(0),
            row_stride(q),
            row_stride(k),
            row_stride(v),
            q.shape[1],
            shape.scale,
            shape.softcap or 0.0,
            shape.window or 0,
        )
        return torch.frombuffer(bytearray(words), dtype=torch.int64)
