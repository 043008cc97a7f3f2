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

from loraplex_services.worker.ops.attention.backend import AttentionBackend, AttentionMask
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, decode, encode
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
    decode_visible: Tensor
    """bool `[num_generations, 1, 1, N * T]`: keys that a generation sees."""
    decode_in_chunk: Tensor | None
    """Those that are in its chunk, for layers whose window does not slide; None = no window."""


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
        keys = keys + first_of_row[self.num_contexts :, None] * num_slots
        now = self.position_ids[self.num_ctx_tokens :, None]
        visible_keys, in_chunk = keys <= now, None
        if window is not None:
            in_chunk = (visible_keys & (keys >= now // window * window))[:, None, None]
            visible_keys &= keys > now - window
        contexts = range(self.num_contexts)
        write_blocks = padded[row_of_token, index]
        return GroupTables(
            write_blocks=write_blocks,
            fresh_blocks=write_blocks[self.position_ids % num_slots == 0],
            context_blocks=tuple(padded[i, : len(visible[i])] for i in contexts),
            context_begins=tuple(firsts[i] * num_slots for i in contexts),
            decode_blocks=decode,
            decode_visible=visible_keys[:, None, None],
            decode_in_chunk=in_chunk,
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
        num_tokens, shape = len(q), self.shape
        queries = q.reshape(num_tokens, shape.num_kv_heads, shape.num_shared, shape.head_dim)
        keys = k.reshape(num_tokens, shape.num_kv_heads, shape.head_dim)
        values = v.reshape(num_tokens, shape.num_kv_heads, shape.head_dim)
        is_full = self.sees_all(metadata, attention_mask)
        if not metadata.kv_cache_params.use_cache:
            return self._without_cache(queries, keys, values, metadata, is_full=is_full)
        return self._with_cache(queries, keys, values, metadata, is_full=is_full)

    def _without_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: VanillaAttentionMetadata,
        *,
        is_full: bool,
    ) -> Tensor:
        out = [
            self._context(
                q[begin:end],
                k[begin:end].transpose(0, 1),
                v[begin:end].transpose(0, 1),
                None if is_full else start,
                start,
            )
            for begin, end, start in metadata.spans
        ]
        return torch.cat(out)

    def _with_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: VanillaAttentionMetadata,
        *,
        is_full: bool,
    ) -> Tensor:
        assert metadata.kv_cache_manager is not None
        cache = metadata.kv_cache_manager
        k_plane, v_plane = cache.planes(self.layer_idx)
        scales = cache.scales(self.layer_idx)
        group = metadata.groups[metadata.kv_cache_manager.group_of(self.layer_idx)]
        if len(group.fresh_blocks):
            k_plane[group.fresh_blocks] = 0
            v_plane[group.fresh_blocks] = 0
        if scales is not None:
            k, new_k_scales = encode(k, k_plane.dtype, scales[0].dtype)
            v, new_v_scales = encode(v, v_plane.dtype, scales[1].dtype)
            for plane, new in zip(scales, (new_k_scales, new_v_scales), strict=True):
                plane[group.fresh_blocks] = 0
                plane[group.write_blocks, :, metadata.write_offsets] = new
        k_plane[group.write_blocks, :, metadata.write_offsets] = k
        v_plane[group.write_blocks, :, metadata.write_offsets] = v
        k_scales, v_scales = scales or (None, None)
        kept_k, kept_v = _Kept(k_plane, k_scales, q.dtype), _Kept(v_plane, v_scales, q.dtype)
        out = []
        for i, (begin, end, start) in enumerate(metadata.spans):
            key_begin = group.context_begins[i]
            num_keys = start + end - begin - key_begin
            keys = kept_k.sequence(group.context_blocks[i])[:, :num_keys]
            values = kept_v.sequence(group.context_blocks[i])[:, :num_keys]
            causal_start = None if is_full else start
            out.append(self._context(q[begin:end], keys, values, causal_start, key_begin))
        if metadata.num_generations:
            out.append(self._decode(q[metadata.num_ctx_tokens :], kept_k, kept_v, group))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _context(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int | None, key_begin: int
    ) -> Tensor:
        """Queries `[n, Hkv, G, D]` at positions from `start` (None = all keys visible) over keys
        `[Hkv, K, D]` at positions from `key_begin`; `[n, Hq * D]`."""
        num_rows = max(1, MAX_SCORE_ITEMS // (q.shape[1] * q.shape[2] * keys.shape[1]))
        chunks = []
        for row in range(0, len(q), num_rows):
            chunk = q[row : row + num_rows]
            visible = None
            if start is not None:
                now = torch.arange(start + row, start + row + len(chunk), device=q.device)[:, None]
                at = torch.arange(key_begin, key_begin + keys.shape[1], device=q.device)
                visible = at <= now
                if self.shape.window is not None and self.shape.is_chunked:
                    visible &= at >= now // self.shape.window * self.shape.window
                elif self.shape.window is not None:
                    visible &= at > now - self.shape.window
            sinks = self._shaped_sinks(self.shape.num_kv_heads, self.shape.num_shared, 1, 1)
            heads = chunk.permute(1, 2, 0, 3)
            out = self._attend(heads, keys[:, None], values[:, None], visible, sinks)
            chunks.append(out.permute(2, 0, 1, 3))
        return torch.cat(chunks).reshape(len(q), -1)

    def _decode(self, q: Tensor, kept_k: _Kept, kept_v: _Kept, group: GroupTables) -> Tensor:
        """One query per sequence, `[R, Hkv, G, D]`; `[R, Hq * D]`."""
        keys = kept_k.sequences(group.decode_blocks)
        values = kept_v.sequences(group.decode_blocks)
        sinks = self._shaped_sinks(1, self.shape.num_kv_heads, self.shape.num_shared, 1)
        visible = group.decode_in_chunk if self.shape.is_chunked else group.decode_visible
        return self._attend(q, keys, values, visible, sinks).reshape(len(q), -1)

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
    """What they are read as."""

    def sequence(self, blocks: Tensor) -> Tensor:
        """Gather blocks `[N]` as `[Hkv, N * T, D]`."""
        return self._gathered(blocks).transpose(0, 1).flatten(1, 2)

    def sequences(self, blocks: Tensor) -> Tensor:
        """Gather blocks `[R, N]` as `[R, Hkv, N * T, D]`."""
        if self.scales is None:
            return _sequences(self.plane, blocks)
        return self._gathered(blocks).transpose(1, 2).flatten(2, 3)

    def _gathered(self, blocks: Tensor) -> Tensor:
        """`[*blocks.shape, Hkv, T, D]`."""
        if self.scales is None:
            return self.plane[blocks]
        return decode(self.plane[blocks], self.scales[blocks]).to(self.dtype)


def _sequences(plane: Tensor, blocks: Tensor) -> Tensor:
    """Gather blocks `[R, N]` of `[num_blocks, Hkv, T, D]` as `[R, Hkv, N * T, D]`."""
    num_blocks, num_heads, num_slots, width = plane.shape
    items = num_slots * width
    # Each head's part of a block as one row to copy: an index of elements costs five times as much.
    heads_apart, rest = divmod(plane.stride(0), items)
    assert plane[0].is_contiguous(), plane.stride()
    if rest:  # layers of another width decide how large a block is
        return plane[blocks].transpose(1, 2).flatten(2, 3)
    num_rows = (num_blocks - 1) * heads_apart + num_heads
    rows = plane.as_strided((num_rows, items), (items, 1))
    heads = torch.arange(num_heads, device=blocks.device)[:, None]
    ids = blocks[:, None] * heads_apart + heads
    return rows.index_select(0, ids.flatten()).view(len(blocks), num_heads, -1, width)
