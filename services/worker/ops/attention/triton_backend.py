"""Attention by Triton kernels: contexts in tiles of queries, generations in items of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraplex_services.worker.ops.attention import triton as kernels
from loraplex_services.worker.ops.attention import work_items
from loraplex_services.worker.ops.attention.backend import (
    AttentionBackend,
    AttentionMaker,
    AttentionMask,
)
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, NO_SCALES, Scales
from loraplex_services.worker.ops.attention.metadata import (
    PASS_BLOCK_TOKENS,
    AttentionMetadata,
    StaticInputs,
)
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.work_items import PartialSums
from loraplex_services.worker.ops.attention.workspace import HeadSizes, Workspace, head_sizes
from loraplex_services.worker.ops.rope.triton import rotate_and_append
from loraplex_services.worker.transfers import copy_into, to_device


@dataclass(slots=True)
class TritonAttentionMetadata(AttentionMetadata):
    """Adds block tables, tiles, items and KV slots on the device."""

    workspace: Workspace = field(default_factory=Workspace)
    tables: tuple[Tensor, ...] = ()
    """Per KV group: int32 `[rows, blocks]`."""
    table_rows: Sequence[int] | None = None
    """The row of each sequence's blocks in `tables`; None = the sequences are the rows in order."""
    decode_rows: Tensor | None = None
    """int32 `[num_generations]` on the device: `table_rows` of the generations."""
    kv_slots: tuple[Tensor, ...] = ()
    """Per KV group: int64 `[num_tokens]`, block * T + slot of each new token; -1 = none."""
    split_limit: int = work_items.LARGEST_SPLIT
    """Keys of an item, at most."""
    max_items: int = 0
    """Items of the generations, at most."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """Spans of the context; see `context_spans`."""
    _context_tiles: dict[int, Tensor] = field(init=False, default_factory=dict)
    _items: dict[int | None, Tensor] = field(init=False, default_factory=dict)
    """Work items by window."""
    _partial: dict[HeadSizes, PartialSums] = field(init=False, default_factory=dict)

    def prepare(self) -> None:
        """Compute block tables, cache positions and sizes from the predefined fields."""
        if self.is_dummy_attention:
            return
        params = self.kv_cache_params
        assert self.position_ids is not None
        self.spans = self.context_spans()
        if not params.use_cache:
            self._set_tables((self.pass_planes().tables,), PASS_BLOCK_TOKENS)
            return
        assert self.kv_cache_manager is not None
        starts = params.num_cached_tokens_per_seq
        if (given := self.device_inputs) is not None:
            self.tables, self.kv_slots = given.tables, given.kv_slots
            self.table_rows, self.decode_rows = given.table_rows, given.decode_rows
        else:
            self._set_tables(params.block_tables, self.kv_cache_manager.tokens_per_block)
        self.split_limit = self.split_limit_of(self.num_generations)
        self.max_items = sum(
            work_items.max_splits(start + 1, self.split_limit)
            for start in starts[self.num_contexts :]
        )

    def _set_tables(
        self, block_tables: Sequence[Sequence[Sequence[int]]], block_tokens: int
    ) -> None:
        assert self.position_ids is not None
        device = self.position_ids.device
        self.tables = tuple(_table(rows, device) for rows in block_tables)
        self.kv_slots = _kv_slots(self.tables, self.seq_lens, self.position_ids, block_tokens)
        self.decode_rows = _rows_in_order(self.num_contexts, self.num_generations, device)

    def prepare_idle(self) -> None:
        """Launches the kernels without writing keys, because no token has a cache position."""
        self.prepare()
        self.kv_slots = tuple(torch.full_like(kv_slots, -1) for kv_slots in self.kv_slots)

    def create_cuda_graph_metadata(self, inputs: StaticInputs) -> TritonAttentionMetadata:
        """See AttentionMetadata. Padding rows have one item without keys."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        fields |= {
            "is_cuda_graph": True,
            "tables": inputs.tables,
            "decode_rows": inputs.table_rows,
            "kv_slots": inputs.kv_slots,
        }
        if inputs.max_contexts:
            contexts = CapturedContexts(**fields | {"num_contexts": inputs.max_contexts})
            contexts.reserve(inputs)
            return contexts
        made = TritonAttentionMetadata(**fields)
        made.split_limit = made.split_limit_of(self.num_generations)
        made.max_items = self.num_generations * work_items.max_splits(
            inputs.max_keys, made.split_limit
        )
        return made

    def split_limit_of(self, num_rows: int) -> int:
        """Keys of an item, at most, for `num_rows` generations."""
        assert self.position_ids is not None and self.kv_cache_manager is not None
        num_kv_heads, device = self.kv_cache_manager.num_kv_heads, self.position_ids.device
        return work_items.split_limit(max(num_rows, 1), num_kv_heads, device)

    def begin_forward(self) -> None:
        """List the items of the generations, for each window that layers have."""
        if self.num_generations and not self.is_dummy_attention:
            self._list_items(self.num_ctx_tokens, self.num_tokens)

    def _list_items(self, begin: int, end: int) -> None:
        """List the items of the generations in token rows [begin, end)."""
        assert self.position_ids is not None and self.kv_cache_manager is not None
        assert self.decode_rows is not None, "prepared, or set by the caller"
        for group, window in enumerate(self.kv_cache_manager.windows):
            if window not in self.kv_cache_manager.windows[:group]:
                inputs = self.position_ids, self.kv_slots[group], self.decode_rows
                rows = begin, end
                work_items.list_items(self.items(window), *inputs, rows, window, self.split_limit)

    def items(self, window: int | None) -> Tensor:
        """Items of the generations for layers of a window: `begin_forward` lists them."""
        if window not in self._items:
            assert self.position_ids is not None
            self._items[window] = work_items.empty_items(self.max_items, self.position_ids.device)
        return self._items[window]

    def output(self, q: Tensor) -> Tensor:
        """Where the results for `q` go."""
        return q.new_empty(q.shape)

    def context_tiles(self, block_rows: int) -> Tensor:
        """`tiles` of `attend_contexts`, int32 `[n, 5]` on the device; made once a step."""
        if block_rows not in self._context_tiles:
            assert self.position_ids is not None
            rows = kernels.context_tiles(self.spans, block_rows, self.table_rows)
            tiles = torch.tensor(rows, dtype=torch.int32).view(-1, kernels.TILE_WORDS)
            self._context_tiles[block_rows] = to_device(tiles, self.position_ids.device)
        return self._context_tiles[block_rows]

    def partial_sums(self, shape: HeadShape) -> PartialSums:
        """Workspace of the generations, the same for all layers of one size."""
        sizes = head_sizes(shape)
        if sizes not in self._partial:
            assert self.position_ids is not None
            self._partial[sizes] = self.workspace.partial_sums(
                self.max_items, self.num_tokens, shape, self.position_ids.device
            )
        return self._partial[sizes]


@dataclass(slots=True)
class CapturedContexts(TritonAttentionMetadata):
    """Metadata of a captured step with up to `num_contexts` contexts, and generations after them.

    How many there are, and which token rows are theirs, differs between replays. `fill` writes the
    tiles and the items, so that both launches find what is to be computed on the device.
    """

    def reserve(self, inputs: StaticInputs) -> None:
        """Allocate items for any number of generations, and fill with padding."""
        self.max_items = max(
            num_rows * work_items.max_splits(inputs.max_keys, self.split_limit_of(num_rows))
            for num_rows in range(1, 1 + min(self.num_tokens, len(inputs.table_rows)))
        )
        self.fill((), (), (), 0)

    def fill(
        self,
        lens: Sequence[int],
        starts: Sequence[int],
        table_rows: Sequence[int],
        num_contexts: int,
    ) -> None:
        """See `AttentionMetadata.fill`."""
        assert num_contexts <= self.num_contexts, (num_contexts, self.num_contexts)
        assert self.kv_cache_manager is not None
        ends = [0, *accumulate(lens)]
        self.spans = tuple(zip(ends, ends[1:], starts, strict=False))[:num_contexts]
        self.table_rows = table_rows
        for block_rows, tiles in self._context_tiles.items():
            self._fill_tiles(tiles, block_rows)
        if num_generations := len(lens) - num_contexts:
            self.split_limit = self.split_limit_of(num_generations)
            self._list_items(ends[num_contexts], ends[-1])
        else:
            for window in self.kv_cache_manager.windows:
                self.items(window)[:1].zero_()

    def begin_forward(self) -> None:
        """Does nothing: `fill` has listed the items."""

    def context_tiles(self, block_rows: int) -> Tensor:
        """The most tiles that contexts may have. Tiles that are not used have no rows."""
        if block_rows not in self._context_tiles:
            assert self.position_ids is not None
            num_tiles = self.num_tokens // block_rows + self.num_contexts
            shape, device = (num_tiles, kernels.TILE_WORDS), self.position_ids.device
            tiles = torch.zeros(shape, dtype=torch.int32, device=device)
            self._context_tiles[block_rows] = tiles
            if self.spans:
                self._fill_tiles(tiles, block_rows)
        return self._context_tiles[block_rows]

    def _fill_tiles(self, tiles: Tensor, block_rows: int) -> None:
        rows = torch.zeros(tiles.shape, dtype=torch.int32)
        used = kernels.context_tiles(self.spans, block_rows, self.table_rows)
        if used:
            rows[: len(used)] = torch.tensor(used, dtype=torch.int32)
        copy_into(tiles, rows)

    def output(self, q: Tensor) -> Tensor:
        """See `Workspace.padded_output`."""
        return self.workspace.padded_output(q)


def _rows_in_order(first: int, num_rows: int, device: torch.device) -> Tensor:
    """int32 `[num_rows]`: first, first + 1 and so on."""
    return torch.arange(first, first + num_rows, dtype=torch.int32, device=device)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 `[sequences, longest]`; entries after a sequence's last block are never read."""
    lens = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = int(lens.max(initial=0))
    table = np.zeros((len(rows), width), dtype=np.int32)
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lens.sum()))
    table[np.arange(width) < lens[:, None]] = ids
    return to_device(torch.from_numpy(table), device)


def _kv_slots(
    tables: Sequence[Tensor], seq_lens: Tensor, positions: Tensor, num_slots: int
) -> tuple[Tensor, ...]:
    sequence_of_token = to_device(torch.repeat_interleave(seq_lens), positions.device)
    return tuple(
        table[sequence_of_token, positions // num_slots].long() * num_slots + positions % num_slots
        for table in tables
    )


class LayerCache(NamedTuple):
    """Where the keys and values of a layer lie, in the KV cache or for one pass."""

    planes: tuple[Tensor, Tensor]
    scales: Scales
    group: int
    """KV group."""


class TritonAttention(AttentionBackend):
    """One layer."""

    Metadata = TritonAttentionMetadata
    kv_cache_dtypes = frozenset(KV_CODES)
    rotates = True
    captures_graphs = True
    captures_contexts = True
    # They launch all kernels but that of large steps, which the largest of the warm-up launches.
    warm_up_sizes = (2,)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        assert isinstance(metadata, TritonAttentionMetadata), type(metadata)
        q, k, v = self.split(q, k, v)
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        is_full = self.sees_all(metadata, attention_mask)
        cache = self._cache(k, metadata)
        where = cache.planes, metadata.kv_slots[cache.group], cache.scales
        if self.pos_embd_params is None:
            kernels.append(k, v, *where)
        else:
            rotate_and_append(q, k, v, metadata.rotations[self.layer_idx], *where)
        out = metadata.output(q)
        self._attend(out, q, cache, metadata, is_full=is_full)
        return out

    def _cache(self, k: Tensor, metadata: TritonAttentionMetadata) -> LayerCache:
        if not metadata.kv_cache_params.use_cache:
            return LayerCache(metadata.pass_planes().planes(k, self.shape), NO_SCALES, 0)
        assert metadata.kv_cache_manager is not None
        cache, layer = metadata.kv_cache_manager, self.layer_idx
        scales = cache.scales(layer) or NO_SCALES
        return LayerCache(cache.planes(layer), scales, cache.group_of(layer))

    def _attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: LayerCache,
        metadata: TritonAttentionMetadata,
        *,
        is_full: bool,
    ) -> None:
        """Compute `out` once this step's keys and values are in the cache."""
        shape, planes, scales = self.shape, cache.planes, cache.scales
        tables = metadata.tables[cache.group]
        if metadata.num_contexts:
            tiling = kernels.tiling_of_contexts(shape, q, scales)
            tiles = metadata.context_tiles(tiling.block_queries // shape.block_shared)
            inputs = out, q, planes, tiles, tables, shape, tiling, self.sinks
            kernels.attend_contexts(*inputs, scales=scales, is_full=is_full)
        if metadata.num_generations:
            items, partial = metadata.items(shape.window), metadata.partial_sums(shape)
            rows = out, q, planes, items, tables, shape, partial, self.sinks
            kernels.attend_generations(*rows, scales=scales)


def triton_attention() -> AttentionMaker:
    """The backend of one runner, whose steps share a workspace."""
    return AttentionMaker(TritonAttention, metadata_fields={"workspace": Workspace()})
