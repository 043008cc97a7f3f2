"""Paged attention in C++ for ragged batches of contexts and generations.

`native/src/attention_tiles.cpp` in bfloat16 where the library has dot products of it,
`native/src/attention.cpp` elsewhere.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.native.bindings import TILE_INPUTS, TILE_ROWS, Native, row_stride
from loraplex_services.worker.native.library import DTYPE_CODES
from loraplex_services.worker.ops.attention.backend import AttentionBackend, AttentionMask
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES
from loraplex_services.worker.ops.attention.metadata import PASS_BLOCK_TOKENS, AttentionMetadata


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
        lens: list[int] = self.seq_lens.tolist()
        counts = (-(-num // self.task_queries) for num in lens)
        self.task_ends = torch.tensor(list(accumulate(counts)), dtype=torch.int64)
        rows = list(accumulate(lens, initial=0))[:-1]
        starts = params.num_cached_tokens_per_seq
        tables = params.block_tables
        if not params.use_cache:
            starts, tables = (0,) * len(lens), (self.pass_planes().tables,)
        self.groups = tuple(_flatten(rows, lens, starts, table) for table in tables)


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


class NativeAttention(AttentionBackend):
    """One layer."""

    Metadata = NativeAttentionMetadata
    kv_cache_dtypes = frozenset(KV_CODES)
    has_chunks = True

    def __init__(self, *heads: Any, native: Native, **others: Any) -> None:
        """`heads`, `others`: as `AttentionBackend` takes them."""
        super().__init__(*heads, **others)
        self._native = native
        self._layouts: dict[tuple[Any, ...], Tensor] = {}

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`; rows of q, k, v may lie apart."""
        assert isinstance(metadata, NativeAttentionMetadata), type(metadata)
        q, k, v = self.split(q, k, v)
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        assert metadata.task_ends is not None
        cache = metadata.kv_cache_manager
        scales = None
        if metadata.kv_cache_params.use_cache:
            assert cache is not None
            scales = cache.scales(self.layer_idx)
            planes, block_tokens = cache.planes(self.layer_idx), cache.tokens_per_block
            group = metadata.groups[cache.group_of(self.layer_idx)]
        else:
            planes, block_tokens = metadata.pass_planes().planes(k, self.shape), PASS_BLOCK_TOKENS
            group = metadata.groups[0]
        is_full = self.sees_all(metadata, attention_mask)
        layout = self._layout(q, k, v, planes[0], scales, block_tokens, is_full=is_full)
        if self._fits_tiles(q.dtype, block_tokens):
            return self._native.attend_tiles(q, k, v, planes, layout, group.words)
        return self._native.attend(q, k, v, planes, layout, group.words, metadata.task_ends)

    def _fits_tiles(self, dtype: torch.dtype, block_tokens: int) -> bool:
        is_whole = self.shape.head_dim % TILE_INPUTS == 0 and block_tokens == TILE_ROWS
        return self._native.has_tiles and dtype is torch.bfloat16 and is_whole

    def _layout(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plane: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        block_tokens: int,
        *,
        is_full: bool,
    ) -> Tensor:
        """Kept, because steps have few layouts, and programs hold their addresses."""
        strides = plane.stride(0), row_stride(q), row_stride(k), row_stride(v), q.shape[1]
        addresses = (0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())
        key = block_tokens, strides, is_full, DTYPE_CODES[plane.dtype], addresses
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._new_layout(*key)
        return layout

    def _new_layout(
        self,
        block_tokens: int,
        strides: tuple[int, ...],
        is_full: bool,
        stored: int,
        scales: tuple[int, int],
    ) -> Tensor:
        shape = self.shape
        words = struct.pack(
            "9q2d7q",
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            block_tokens,
            *strides,
            shape.scale,
            shape.softcap or 0.0,
            shape.window or 0,
            shape.is_chunked,
            0 if self.sinks is None else self.sinks.data_ptr(),
            is_full,
            stored,
            *scales,
        )
        return torch.frombuffer(bytearray(words), dtype=torch.int64)
