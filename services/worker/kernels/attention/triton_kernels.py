"""Triton programs of paged attention. Layouts and grids: README.md; launches: `triton.py`.

One program attends with a tile: some query rows of one sequence times the query heads that share a
KV head, over one split of the keys. Contexts and generations differ in tile and split sizes only.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1.0e30)
TILE_WORDS = tl.constexpr(4)


@triton.jit(do_not_specialize=["first_row", "window", "table_stride"])
def attend(
    q, k_plane, v_plane, out, partial, partial_stats, tiles, tables,
    plane_stride, q_stride, out_stride, table_stride, first_row, num_heads, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    TOKENS: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the keys that t sees.

    Grid: (tile, KV head, split). `tiles [n, 4]` int32: sequence, first token row, end row, position
    of the first row. `tables [sequences, blocks]` int32. With several splits each writes its
    maximum, sum and values to `partial`; `combine` joins them in order.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + tile * TILE_WORDS).to(tl.int64)
    row_begin = tl.load(tiles + tile * TILE_WORDS + 1)
    row_end = tl.load(tiles + tile * TILE_WORDS + 2)
    start = tl.load(tiles + tile * TILE_WORDS + 3)
    m = tl.arange(0, BLOCK_ROWS * BLOCK_SHARED)
    row = row_begin + m // BLOCK_SHARED
    is_query = (row < row_end) & (m % BLOCK_SHARED < NUM_SHARED)
    head = kv_head * NUM_SHARED + m % BLOCK_SHARED
    dim = tl.arange(0, BLOCK_DIM)
    mask = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = q + row.to(tl.int64)[:, None] * q_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    query = tl.load(q_at, mask=mask, other=0.0)
    key_begin, end = _visible_keys(start, row_end - row_begin, window, BLOCK_KEYS, HAS_WINDOW)
    span = tl.cdiv(tl.cdiv(end - key_begin, NUM_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = key_begin + split * span
    head_at = kv_head.to(tl.int64) * (TOKENS * HEAD_DIM)
    top, total, values = _attend_keys(
        query, start + row - row_begin, start, k_plane + head_at, v_plane + head_at,
        tables + sequence * table_stride, plane_stride, begin, tl.minimum(end, begin + span),
        scale, softcap, window, HEAD_DIM, BLOCK_DIM, BLOCK_ROWS * BLOCK_SHARED, BLOCK_KEYS,
        TOKENS, HAS_SOFTCAP, HAS_WINDOW, WIDEN,
    )  # fmt: skip
    if NUM_SPLITS == 1:
        out_at = out + row.to(tl.int64)[:, None] * out_stride + (head * HEAD_DIM)[:, None]
        values = values / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_at + dim[None, :], values.to(out.dtype.element_ty), mask=mask)
    else:
        line = ((row - first_row).to(tl.int64) * num_heads + head) * NUM_SPLITS + split
        place = partial + line[:, None] * BLOCK_DIM + dim[None, :]
        tl.store(place, values, mask=is_query[:, None])
        tl.store(partial_stats + line * 2, top, mask=is_query)
        tl.store(partial_stats + line * 2 + 1, total, mask=is_query)


@triton.jit
def _visible_keys(start, num_rows, window, BLOCK_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Positions [begin, end) that any of the rows from position `start` on sees."""
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, start - window + 1) // BLOCK_KEYS * BLOCK_KEYS
    return begin, start + num_rows


@triton.jit
def _attend_keys(
    query, position, start, k_head, v_head, table, plane_stride, begin, end, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Running softmax over keys [begin, end): maximum, sum, and values `[queries, BLOCK_DIM]`."""
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((BLOCK_QUERIES,), NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    values = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), tl.float32)
    if WIDEN:
        query = query.to(tl.float32)
    for at in tl.range(begin, end, BLOCK_KEYS):
        key = at + tl.arange(0, BLOCK_KEYS)
        is_key = key < end
        if HAS_WINDOW:
            # Blocks behind the first row's window may be gone.
            is_key = is_key & (key > start - window)
        block = tl.load(table + key // TOKENS, mask=is_key, other=0).to(tl.int64)
        place = block * plane_stride + (key % TOKENS) * HEAD_DIM
        mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_head + place[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(v_head + place[:, None] + dim[None, :], mask=mask, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, NO_SCORE)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None]
        values = tl.dot(weights.to(v.dtype), v, values, input_precision="ieee")
        top = new_top
    return top, total, values


@triton.jit(do_not_specialize=["first_row"])
def combine(
    partial,
    partial_stats,
    out,
    num_heads,
    first_row,
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Join the splits of one row and head, in order. Grid: (row, head)."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, BLOCK_DIM)
    line = (row.to(tl.int64) * num_heads + head) * NUM_SPLITS
    top = tl.load(partial_stats + line * 2)
    for split in tl.static_range(1, NUM_SPLITS):
        top = tl.maximum(top, tl.load(partial_stats + (line + split) * 2))
    total = 0.0
    values = tl.zeros((BLOCK_DIM,), tl.float32)
    for split in tl.static_range(0, NUM_SPLITS):
        weight = tl.exp(tl.load(partial_stats + (line + split) * 2) - top)
        total += weight * tl.load(partial_stats + (line + split) * 2 + 1)
        values += weight * tl.load(partial + (line + split) * BLOCK_DIM + dim)
    place = out + (first_row + row).to(tl.int64) * out_stride + head * HEAD_DIM + dim
    total = tl.where(total > 0, total, 1.0)
    tl.store(place, (values / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def append(
    k,
    v,
    k_plane,
    v_plane,
    places,
    k_stride,
    v_stride,
    plane_stride,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Write new keys and values to their places in the cache. Grid: (token, KV head).

    `places [tokens]` int64: block * TOKENS + slot, or -1 for a padding row.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token)
    dim = tl.arange(0, BLOCK_DIM)
    mask = (dim < HEAD_DIM) & (place >= 0)
    to = (place // TOKENS) * plane_stride + (head * TOKENS + place % TOKENS) * HEAD_DIM + dim
    row = head * HEAD_DIM + dim
    tl.store(k_plane + to, tl.load(k + token * k_stride + row, mask=mask), mask=mask)
    tl.store(v_plane + to, tl.load(v + token * v_stride + row, mask=mask), mask=mask)
