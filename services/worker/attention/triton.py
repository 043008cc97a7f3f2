"""Attention on GPUs by Triton kernels: contexts in tiles of queries, generations in splits of keys.

A pass needs the KV cache; pooling models, which have none, use `vanilla`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.worker.attention.backend import AttentionMask, AttentionMetadata
from services.worker.kernels.attention import triton as kernels
from services.worker.kernels.attention.triton import HeadShape, PartialSums
from services.worker.kernels.rope.triton import rotate_and_append
from services.worker.transfers import to_device

MAX_SPLITS = 16
KEYS_PER_SPLIT = 256
"""Fewer keys are not worth a split of their own."""
TARGET_PROGRAMS = 2 * 132
"""Two waves of the multiprocessors of an H200."""


def choose_splits(num_rows: int, num_kv_heads: int, max_keys: int) -> int:
    """Splits of each generation's keys: a power of two that fills the device. Pure."""
    wanted = min(TARGET_PROGRAMS // (num_rows * num_kv_heads), -(-max_keys // KEYS_PER_SPLIT))
    splits = 1
    while splits * 2 <= min(wanted, MAX_SPLITS):
        splits *= 2
    return splits


@dataclass(slots=True)
class TritonAttentionMetadata(AttentionMetadata):
    """Adds block tables, tiles and cache places on the device."""

    tables: tuple[Tensor, ...] = ()
    """Per KV group: int32 `[num_requests, blocks]`."""
    places: tuple[Tensor, ...] = ()
    """Per KV group: int64 `[num_tokens]`, block * T + slot of each new token; -1 = none."""
    decode_tiles: Tensor | None = None
    """int32 `[num_generations, 4]`."""
    num_splits: int = 1
    spans: tuple[tuple[int, int, int], ...] = ()
    """As `context_spans` says."""
    table_rows: Sequence[int] | None = None
    """Where each sequence's blocks are in `tables`; None = the sequences are its rows in order.
    Set where `tables`, `places` and `decode_tiles` are made by the caller."""
    out: Tensor | None = None
    """`[num_tokens, num_heads * head_dim]`: where results go; None = to a new tensor."""
    _context_tiles: dict[int, Tensor] = field(default_factory=dict)
    _partial: PartialSums | None = None

    def prepare(self) -> None:
        """Compute tables, tiles and places from the predefined fields."""
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
            first = self.num_contexts, self.num_ctx_tokens
            tiles = torch.tensor(decode_tiles(starts[self.num_contexts :], *first))
            self.decode_tiles = to_device(tiles.int().view(-1, 4), device)
        longest = max(starts[self.num_contexts :], default=0) + 1
        num_kv_heads = self.kv_cache_manager.planes(0)[0].shape[1]
        self.num_splits = choose_splits(max(1, self.num_generations), num_kv_heads, longest)

    def context_tiles(self, block_rows: int) -> Tensor:
        """int32 `[n, 4]` on the device; made once a step."""
        if block_rows not in self._context_tiles:
            assert self.position_ids is not None
            rows = kernels.context_tiles(self.spans, block_rows)
            tiles = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
            if self.table_rows is not None and len(tiles):
                tiles[:, 0] = torch.tensor(self.table_rows, dtype=torch.int32)[tiles[:, 0].long()]
            self._context_tiles[block_rows] = to_device(tiles, self.position_ids.device)
        return self._context_tiles[block_rows]

    def partial_sums(self, shape: HeadShape) -> PartialSums:
        """Workspace of the generations; all layers take turns."""
        if self._partial is None:
            assert self.position_ids is not None
            self._partial = kernels.make_partial_sums(
                max(1, self.num_generations), shape, self.num_splits, self.position_ids.device
            )
        return self._partial


def decode_tiles(
    starts: Sequence[int], first_sequence: int, first_row: int
) -> list[tuple[int, int, int, int]]:
    """One tile for each generation: (sequence, token row, end row, position)."""
    return [
        (first_sequence + i, first_row + i, first_row + i + 1, start)
        for i, start in enumerate(starts)
    ]


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 `[sequences, longest]`; places after a sequence's last block are never read."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *([0] * (width - len(row)))] for row in rows]
    return to_device(torch.tensor(padded, dtype=torch.int32).view(len(rows), width), device)


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

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        self._layer = layer_idx
        scale = head_dim**-0.5 if scale is None else scale
        self._shape = HeadShape(
            num_heads, num_kv_heads or num_heads, head_dim, scale, softcap, window
        )

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
        tiling = kernels.context_tiling(self._shape, q.itemsize)
        tiles = metadata.context_tiles(tiling.block_rows)
        partial = PartialSums(q, q)  # one split: never touched
        rows = 0, metadata.num_ctx_tokens
        tables = metadata.tables[group]
        kernels.attend(out, q, planes, tiles, tables, self._shape, tiling, partial, rows)

    def _generations(
        self,
        out: Tensor,
        q: Tensor,
        planes: tuple[Tensor, Tensor],
        group: int,
        metadata: TritonAttentionMetadata,
    ) -> None:
        assert metadata.decode_tiles is not None
        tiling = kernels.decode_tiling(self._shape, metadata.num_splits, q.itemsize)
        partial = metadata.partial_sums(self._shape)
        rows = metadata.num_ctx_tokens, metadata.num_tokens
        tiles, tables = metadata.decode_tiles, metadata.tables[group]
        kernels.attend(out, q, planes, tiles, tables, self._shape, tiling, partial, rows)
