"""Attention on GPUs by Triton kernels: contexts in tiles of queries, generations in items of keys.

A pass needs the KV cache; pooling models, which have none, use `torch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.ops.attention import triton as kernels
from loraplex_services.worker.ops.attention import work_items
from loraplex_services.worker.ops.attention.backend import (
    AttentionMask,
    AttentionMetadata,
    KvCache,
    KvCacheParams,
    StaticInputs,
)
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.work_items import PartialSums
from loraplex_services.worker.ops.rope.triton import rotate_and_append
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.model_config import ModelConfig


class Workspace:
    """Keeps one `PartialSums` for the steps of a runner, which run one after another."""

    def __init__(self) -> None:
        self._sums: PartialSums | None = None

    def partial_sums(
        self, num_items: int, num_rows: int, shape: HeadShape, device: torch.device
    ) -> PartialSums:
        """At least for that many. A larger step replaces what is kept; captured steps hold on to
        their own."""
        known = self._sums
        if known is None or not known.holds(num_items, num_rows):
            if known is not None:
                num_items = max(num_items, len(known.values))
                num_rows = max(num_rows, len(known.num_finished))
            known = work_items.make_partial_sums(num_items, num_rows, shape, device)
        self._sums = known
        return known


@dataclass(slots=True)
class TritonAttentionMetadata(AttentionMetadata):
    """Adds block tables, tiles, items and cache places on the device."""

    workspace: Workspace = field(default_factory=Workspace)
    tables: tuple[Tensor, ...] = ()
    """Per KV group: int32 `[rows, blocks]`."""
    table_rows: Sequence[int] | None = None
    """The row of each sequence's blocks in `tables`; None = the sequences are the rows in order.
    Set where `tables`, `places` and `decode_rows` are made by the caller."""
    decode_rows: Tensor | None = None
    """int32 `[num_generations]` on the device: `table_rows` of the generations."""
    out: Tensor | None = None
    """`[num_tokens, num_heads * head_dim]`: where results go; None = to a new tensor."""
    places: tuple[Tensor, ...] = ()
    """Per KV group: int64 `[num_tokens]`, block * T + slot of each new token; -1 = none."""
    split_limit: int = work_items.LARGEST_SPLIT
    """Keys of an item, at most."""
    max_items: int = 0
    """Items of the generations, at most."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """As `context_spans` says."""
    _context_tiles: dict[int, Tensor] = field(default_factory=dict)
    _items: dict[int | None, Tensor] = field(default_factory=dict)
    """By window."""
    _partial: PartialSums | None = None

    def prepare(self) -> None:
        """Compute tables, places and sizes from the predefined fields."""
        params = self.kv_cache_params
        assert params.use_cache, "passes without a cache use the vanilla backend"
        if self.is_dummy_attention:
            return
        assert self.position_ids is not None and self.kv_cache_manager is not None
        device, num_slots = self.position_ids.device, self.kv_cache_manager.tokens_per_block
        starts = params.num_cached_tokens_per_seq
        self.spans = self.context_spans()
        if self.table_rows is None:
            self.tables = tuple(_table(rows, device) for rows in params.block_tables)
            self.places = _places(self.tables, self.seq_lens, self.position_ids, num_slots)
            self.decode_rows = _rows_in_order(self.num_contexts, self.num_generations, device)
        self.split_limit = _split_limit(self.kv_cache_manager, self.num_generations, device)
        self.max_items = sum(
            work_items.max_splits(start + 1, self.split_limit)
            for start in starts[self.num_contexts :]
        )

    def begin_forward(self) -> None:
        """List the items of the generations, for each window that layers have."""
        if self.is_dummy_attention or not self.num_generations:
            return
        assert self.position_ids is not None and self.kv_cache_manager is not None
        assert self.decode_rows is not None, "prepared, or set by the caller"
        rows = self.num_ctx_tokens, self.num_tokens
        for group, window in enumerate(self.kv_cache_manager.windows):
            if window in self.kv_cache_manager.windows[:group]:
                continue
            if window not in self._items:
                device = self.position_ids.device
                self._items[window] = work_items.empty_items(self.max_items, device)
            inputs = self.position_ids, self.places[group], self.decode_rows
            items = self._items[window]
            work_items.list_items(items, *inputs, rows, window, self.split_limit)

    def items(self, window: int | None) -> Tensor:
        """Items of the generations for layers of a window, once `begin_forward` has run."""
        return self._items[window]

    def context_tiles(self, block_rows: int) -> Tensor:
        """int32 `[n, 4]` on the device; made once a step."""
        if block_rows not in self._context_tiles:
            assert self.position_ids is not None
            rows = kernels.context_tiles(self.spans, block_rows, self.table_rows)
            tiles = torch.tensor(rows, dtype=torch.int32).view(-1, kernels.TILE_WORDS)
            self._context_tiles[block_rows] = to_device(tiles, self.position_ids.device)
        return self._context_tiles[block_rows]

    def partial_sums(self, shape: HeadShape) -> PartialSums:
        """Workspace of the generations, the same for all layers."""
        if self._partial is None:
            assert self.position_ids is not None
            self._partial = self.workspace.partial_sums(
                self.max_items, self.num_generations, shape, self.position_ids.device
            )
        return self._partial


def _split_limit(cache: KvCache, num_rows: int, device: torch.device) -> int:
    """Keys of an item, at most, for `num_rows` generations."""
    num_kv_heads = cache.planes(0)[0].shape[1]
    return work_items.split_limit(max(num_rows, 1), num_kv_heads, device)


def _rows_in_order(first: int, num_rows: int, device: torch.device) -> Tensor:
    """int32 `[num_rows]`."""
    return torch.arange(first, first + num_rows, dtype=torch.int32, device=device)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 `[sequences, longest]`; places after a sequence's last block are never read."""
    lens = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = int(lens.max(initial=0))
    table = np.zeros((len(rows), width), dtype=np.int32)
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lens.sum()))
    table[np.arange(width) < lens[:, None]] = ids
    return to_device(torch.from_numpy(table), device)


def _places(
    tables: Sequence[Tensor], seq_lens: Tensor, positions: Tensor, num_slots: int
) -> tuple[Tensor, ...]:
    sequence_of_token = to_device(torch.repeat_interleave(seq_lens), positions.device)
    return tuple(
        table[sequence_of_token, positions // num_slots].long() * num_slots + positions % num_slots
        for table in tables
    )


class TritonAttention:
    """One layer."""

    def __init__(self, layer_idx: int, shape: HeadShape) -> None:
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
        """See `AttentionBackend.forward`."""
        assert isinstance(metadata, TritonAttentionMetadata), type(metadata)
        assert attention_mask is AttentionMask.CAUSAL, "a KV cache implies the causal mask"
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        planes, group = self._cache(metadata)
        kernels.append(k, v, planes, metadata.places[group])
        return self._attend(q, planes, group, metadata)

    def rotate_and_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `RotatingBackend.rotate_and_forward`."""
        assert isinstance(metadata, TritonAttentionMetadata), type(metadata)
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        planes, group = self._cache(metadata)
        rotate_and_append(q, k, v, cos_sin, planes, metadata.places[group])
        return self._attend(q, planes, group, metadata)

    def _cache(self, metadata: TritonAttentionMetadata) -> tuple[tuple[Tensor, Tensor], int]:
        assert metadata.kv_cache_manager is not None
        cache = metadata.kv_cache_manager
        return cache.planes(self._layer), cache.group_of(self._layer)

    def _attend(
        self,
        q: Tensor,
        planes: tuple[Tensor, Tensor],
        group: int,
        metadata: TritonAttentionMetadata,
    ) -> Tensor:
        out = q.new_empty(q.shape) if metadata.out is None else metadata.out
        if metadata.num_contexts:
            self._contexts(out, q, planes, group, metadata)
        if metadata.num_generations:
            self._generations(out, q, planes, group, metadata)
        return out

    def _contexts(
        self,
        out: Tensor,
        q: Tensor,
        planes: tuple[Tensor, Tensor],
        group: int,
        metadata: TritonAttentionMetadata,
    ) -> None:
        tiles = metadata.context_tiles(kernels.rows_of_tile(self._shape, q))
        kernels.attend_contexts(out, q, planes, tiles, metadata.tables[group], self._shape)

    def _generations(
        self,
        out: Tensor,
        q: Tensor,
        planes: tuple[Tensor, Tensor],
        group: int,
        metadata: TritonAttentionMetadata,
    ) -> None:
        items, partial = metadata.items(self._shape.window), metadata.partial_sums(self._shape)
        first_row, tables = metadata.num_ctx_tokens, metadata.tables[group]
        kernels.attend_generations(out, q, planes, items, tables, first_row, self._shape, partial)


class TritonKernels:
    """Implements `backend.AttentionKernels`."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def layer(self, config: ModelConfig, layer: int) -> TritonAttention:
        """See AttentionKernels."""
        return TritonAttention(layer, HeadShape.of(config, layer))

    def metadata(self, **fields: Any) -> TritonAttentionMetadata:
        """See AttentionKernels."""
        return TritonAttentionMetadata(**fields, workspace=self._workspace)

    def static_metadata(self, inputs: StaticInputs) -> TritonAttentionMetadata:
        """See AttentionKernels. Padding rows have one item without keys."""
        size = len(inputs.positions)
        limit = _split_limit(inputs.cache, size, inputs.positions.device)
        return TritonAttentionMetadata(
            num_contexts=0,
            num_generations=size,
            num_tokens=size,
            num_ctx_tokens=0,
            seq_lens=torch.ones(size, dtype=torch.int64),
            prompt_lens=(),
            request_ids=(),
            kv_cache_params=KvCacheParams(use_cache=True),
            kv_cache_manager=inputs.cache,
            position_ids=inputs.positions,
            max_num_requests=size,
            max_num_tokens=size,
            is_cuda_graph=True,
            workspace=self._workspace,
            tables=inputs.tables,
            decode_rows=inputs.table_rows,
            places=inputs.places,
            split_limit=limit,
            max_items=size * work_items.max_splits(inputs.max_keys, limit),
        )

    def idle_metadata(self, cache: KvCache, positions: Tensor) -> TritonAttentionMetadata:
        """See AttentionKernels. Contexts read the arena's first block, whatever is in it."""
        num_ctx_tokens = len(positions) - 1
        lens = [num_ctx_tokens, 1] if num_ctx_tokens else [1]
        blocks = [0] * -(-len(positions) // cache.tokens_per_block)
        metadata = TritonAttentionMetadata(
            num_contexts=len(lens) - 1,
            num_generations=1,
            num_tokens=len(positions),
            num_ctx_tokens=num_ctx_tokens,
            seq_lens=torch.tensor(lens),
            prompt_lens=(),
            request_ids=(),
            kv_cache_params=KvCacheParams(
                use_cache=True,
                num_cached_tokens_per_seq=(0,) * len(lens),
                block_tables=([blocks] * len(lens),) * len(cache.windows),
            ),
            kv_cache_manager=cache,
            position_ids=positions,
            workspace=self._workspace,
        )
        metadata.prepare()
        metadata.places = tuple(torch.full_like(places, -1) for places in metadata.places)
        return metadata

    def warm_up_variants(self) -> tuple[int, ...]:
        """See AttentionKernels. Kernels depend on nothing but the model, so that one step with a
        context and a generation launches them all."""
        return (2,)
