"""Attention in plain torch, on any device.

Contexts run one by one over exactly the keys they see; generations run together, padded to the
longest. Scores and softmax are float32. On CPUs torch's fused attention computes them. On other
devices they are separate products, so that no fused kernel takes part in comparisons with this
backend. Masks are added to scores. Slots that nothing was written to are made zero before they are
read, since they could be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.ops.attention.backend import AttentionBackend, AttentionMask
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, NO_SCALES, decode, encode
from loraplex_services.worker.ops.attention.metadata import AttentionMetadata

MAX_SCORE_ITEMS = 16 * 1024 * 1024
"""Most float32 scores of one context at a time; longer ones run in chunks of queries."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """One KV group's addresses for a step, on the device."""

    write_blocks: Tensor
    """int64 `[num_tokens]`: block of each new token."""
    fresh_blocks: Tensor
    """int64: blocks whose first token is new."""
    context_blocks: tuple[Tensor, ...]
    """Per context: int64 blocks from the first visible one on."""
    context_begins: tuple[int, ...]
    """Per context: position of its first visible block's first token."""
    decode_blocks: Tensor
    """int64 `[num_generations, N]`: blocks from each sequence's first visible one on, padded with
    that one."""
    decode_positions: Tensor
    """int64 `[num_generations, N * T]`: of the keys in them."""


@dataclass(slots=True)
class VanillaAttentionMetadata(AttentionMetadata):
    """Adds gather and scatter indices for each KV group."""

    write_offsets: Tensor | None = None
    """int64 `[num_tokens]`: index of each new token in its block."""
    groups: tuple[GroupTables, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()
    """Spans of the context; see `context_spans`."""

    def prepare(self) -> None:
        """Compute indices from the predefined fields."""
        lens: list[int] = self.seq_lens.tolist()
        self.spans = self.context_spans()
        if not self.kv_cache_params.use_cache or self.is_dummy_attention:
            return
        assert self.position_ids is not None and self.kv_cache_manager is not None
        num_slots = self.kv_cache_manager.tokens_per_block
        self.write_offsets = self.position_ids % num_slots
        row_of_token = torch.repeat_interleave(self.seq_lens).to(self.position_ids.device)
        self.groups = tuple(
            self._group_tables(tables, window, lens, row_of_token, num_slots)
            for tables, window in zip(
                self.kv_cache_params.block_tables, self.kv_cache_manager.windows, strict=True
            )
        )

    def _group_tables(
        self,
        tables: Sequence[Sequence[int]],
        window: int | None,
        lens: Sequence[int],
        row_of_token: Tensor,
        num_slots: int,
    ) -> GroupTables:
        assert self.position_ids is not None
        device = self.position_ids.device
        starts = self.kv_cache_params.num_cached_tokens_per_seq
        firsts = [_first_visible_block(start, window, num_slots) for start in starts]
        ends = [-(-(start + num) // num_slots) for start, num in zip(starts, lens, strict=True)]
        visible = [
            list(table[first:end]) for table, first, end in zip(tables, firsts, ends, strict=True)
        ]
        padded = _padded(visible).to(device)
        first_of_row = torch.tensor(firsts, device=device)
        index = self.position_ids // num_slots - first_of_row[row_of_token]
        decode = padded[
            self.num_contexts :, : max(map(len, visible[self.num_contexts :]), default=0)
        ]
        keys = torch.arange(decode.shape[1] * num_slots, device=device)
        contexts = range(self.num_contexts)
        write_blocks = padded[row_of_token, index]
        return GroupTables(
            write_blocks=write_blocks,
            fresh_blocks=write_blocks[self.position_ids % num_slots == 0],
            context_blocks=tuple(padded[i, : len(visible[i])] for i in contexts),
            context_begins=tuple(firsts[i] * num_slots for i in contexts),
            decode_blocks=decode,
            decode_positions=keys + first_of_row[self.num_contexts :, None] * num_slots,
        )


def _first_visible_block(start: int, window: int | None, num_slots: int) -> int:
    return 0 if window is None else max(0, start - window + 1) // num_slots


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int64 `[len(rows), longest]`, padded with each row's first block, whose keys are masked."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *(list(row[:1]) * (width - len(row)))] for row in rows]).view(
        len(rows), width
    )


class VanillaAttention(AttentionBackend):
    """One layer."""

    Metadata = VanillaAttentionMetadata
    kv_cache_dtypes = frozenset(KV_CODES)
    has_chunks = True

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        assert isinstance(metadata, VanillaAttentionMetadata), type(metadata)
        q, k, v = self.split(q, k, v)
        if metadata.is_dummy_attention:
            return torch.zeros_like(q)
        shape = self.shape
        q = q.reshape(len(q), shape.num_kv_heads, shape.num_shared, shape.head_dim)
        k, v = (x.reshape(len(x), shape.num_kv_heads, shape.head_dim) for x in (k, v))
        is_full = self.sees_all(metadata, attention_mask)
        spans, cache = metadata.spans, metadata.kv_cache_manager
        generations = []
        if metadata.kv_cache_params.use_cache:
            assert cache is not None
            group = metadata.groups[cache.group_of(self.layer_idx)]
            kept = self._write(k, v, cache, group, metadata.write_offsets)
            seen = [_cached(kept, group, i, span) for i, span in enumerate(spans)]
            if metadata.num_generations:
                generations.append(self._decode(q, kept, group, metadata))
        else:
            seen = [
                (k[begin:end].transpose(0, 1), v[begin:end].transpose(0, 1), start)
                for begin, end, start in spans
            ]
        contexts = [
            self._context(q[begin:end], *own, None if is_full else start)
            for (begin, end, start), own in zip(spans, seen, strict=True)
        ]
        return torch.cat(contexts + generations)

    def _write(
        self,
        k: Tensor,
        v: Tensor,
        cache: KvBuffer,
        group: GroupTables,
        write_offsets: Tensor | None,
    ) -> list[_Kept]:
        """Write new keys and values `[T, Hkv, D]`; all that are in the cache afterwards."""
        kept = []
        at = group.write_blocks, slice(None), write_offsets
        planes, scales = cache.planes(self.layer_idx), cache.scales(self.layer_idx) or NO_SCALES
        for new, plane, own_scales in zip((k, v), planes, scales, strict=True):
            kept.append(_Kept(plane, own_scales, new.dtype))
            if len(group.fresh_blocks):
                plane[group.fresh_blocks] = 0
            if own_scales is not None:
                own_scales[group.fresh_blocks] = 0
                new, own_scales[at] = encode(new, plane.dtype, own_scales.dtype)
            plane[at] = new
        return kept

    def _context(
        self, q: Tensor, keys: Tensor, values: Tensor, key_begin: int, start: int | None
    ) -> Tensor:
        """Queries `[n, Hkv, G, D]` at positions from `start` (None = all keys visible) over keys
        `[Hkv, K, D]` at positions from `key_begin`; `[n, Hq * D]`."""
        num_rows = max(1, MAX_SCORE_ITEMS // (q.shape[1] * q.shape[2] * keys.shape[1]))
        at = torch.arange(key_begin, key_begin + keys.shape[1], device=q.device)
        sinks = self._shaped_sinks(self.shape.num_kv_heads, self.shape.num_shared, 1, 1)
        chunks = []
        for row in range(0, len(q), num_rows):
            chunk, visible = q[row : row + num_rows], None
            if start is not None:
                now = torch.arange(start + row, start + row + len(chunk), device=q.device)
                visible = self._visible(at, now[:, None])
            heads = chunk.permute(1, 2, 0, 3)
            out = self._attend(heads, keys[:, None], values[:, None], visible, sinks)
            chunks.append(out.permute(2, 0, 1, 3))
        return torch.cat(chunks).reshape(len(q), -1)

    def _decode(
        self,
        q: Tensor,
        kept: Sequence[_Kept],
        group: GroupTables,
        metadata: VanillaAttentionMetadata,
    ) -> Tensor:
        """The last of the queries `[T, Hkv, G, D]`, one for each generation; `[R, Hq * D]`."""
        assert metadata.position_ids is not None
        first = metadata.num_ctx_tokens
        keys, values = (x.sequences(group.decode_blocks) for x in kept)
        sinks = self._shaped_sinks(1, self.shape.num_kv_heads, self.shape.num_shared, 1)
        visible = self._visible(group.decode_positions, metadata.position_ids[first:, None])
        out = self._attend(q[first:], keys, values, visible[:, None, None], sinks)
        return out.reshape(len(out), -1)

    def _visible(self, at: Tensor, now: Tensor) -> Tensor:
        """Whether queries at positions `now` see keys at positions `at`, which broadcast."""
        visible = at <= now
        if self.shape.window is not None and self.shape.is_chunked:
            visible &= at >= now // self.shape.window * self.shape.window
        elif self.shape.window is not None:
            visible &= at > now - self.shape.window
        return visible

    def _shaped_sinks(self, *shape: int) -> Tensor | None:
        return None if self.sinks is None else self.sinks.view(shape)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """`[B, H, n, D]` over `[B, H or 1, K, D]`, all finite where not visible. `sinks` have the
        shape of a score of each query, or one that broadcasts to it."""
        scale, softcap = self.shape.scale, self.shape.softcap
        if softcap is None and sinks is None and q.device.type == "cpu":
            k, v = (x.expand(*q.shape[:2], -1, -1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        scores = torch.matmul(q.float(), k.mT.float()).mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if visible is not None:
            scores = scores.masked_fill_(~visible, float("-inf"))
        if sinks is None:
            return torch.matmul(scores.softmax(dim=-1), v.float()).to(q.dtype)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        return torch.matmul(scores.softmax(dim=-1)[..., :-1], v.float()).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Keys or values of a layer in every block."""

    plane: Tensor
    """`[num_blocks, Hkv, T, D]`."""
    scales: Tensor | None
    """`[num_blocks, Hkv, T]` of a plane of codes."""
    dtype: torch.dtype
    """The dtype in which they are read."""

    def sequence(self, blocks: Tensor) -> Tensor:
        """Gather blocks `[N]` as `[Hkv, N * T, D]`."""
        return self._gathered(blocks).transpose(0, 1).flatten(1, 2)

    def sequences(self, blocks: Tensor) -> Tensor:
        """Gather blocks `[R, N]` as `[R, Hkv, N * T, D]`."""
        num_blocks, num_heads, num_slots, width = self.plane.shape
        items = num_slots * width
        heads_apart, rest = divmod(self.plane.stride(0), items)
        if self.scales is not None or rest:  # layers of another width decide how large a block is
            return self._gathered(blocks).transpose(1, 2).flatten(2, 3)
        # Each head's part of a block as one row: an index of elements costs five times as much.
        num_rows = (num_blocks - 1) * heads_apart + num_heads
        rows = self.plane.as_strided((num_rows, items), (items, 1))
        heads = torch.arange(num_heads, device=blocks.device)[:, None]
        ids = blocks[:, None] * heads_apart + heads
        return rows.index_select(0, ids.flatten()).view(len(blocks), num_heads, -1, width)

    def _gathered(self, blocks: Tensor) -> Tensor:
        """`[*blocks.shape, Hkv, T, D]`."""
        if self.scales is None:
            return self.plane[blocks]
        return decode(self.plane[blocks], self.scales[blocks]).to(self.dtype)


def _cached(
    kept: Sequence[_Kept], group: GroupTables, index: int, span: tuple[int, int, int]
) -> tuple[Tensor, Tensor, int]:
    """Keys and values `[Hkv, K, D]` that a context sees, and the position of the first."""
    (begin, end, start), key_begin = span, group.context_begins[index]
    num_keys = start + end - begin - key_begin
    keys, values = (x.sequence(group.context_blocks[index])[:, :num_keys] for x in kept)
    return keys, values, key_begin
