"""Triton programs of paged attention. Layouts and grids: README.md; launches: `triton.py`.

Contexts and generations share `_attend_keys`, the loop over keys. Contexts call it with many
queries of one sequence and a causal mask, generations with one query and a range that needs none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex_services.worker.ops.attention.item_kernel import ITEM_WORDS
from loraplex_services.worker.ops.attention.triton_codes import store_codes, widened
from loraplex_services.worker.ops.early import wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1.0e30)
TILE_WORDS = tl.constexpr(5)

ALL_KEYS = tl.constexpr(0)
"""Every query sees every key of the range, whose length is a multiple of the step."""
KEYS_BELOW_END = tl.constexpr(1)
"""Every query sees every key of the range."""
CAUSAL_KEYS = tl.constexpr(2)
"""A query sees the keys up to its own position, and within its window if there is one."""


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_contexts(
    q, k_plane, v_plane, k_scales, v_scales, out, sinks, tiles, tables,
    plane_stride, q_stride, out_stride, table_stride, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WIDEN: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the keys that t sees.

    Grid: (KV head, tile). `tiles [n, 5]` int32: sequence, first token row, end row, position of the
    first row, keys of the sequence. `tables [sequences, blocks]` int32. `k_scales`, `v_scales`:
    of codes, in the same blocks as their planes; None = no codes.
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
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
    query = _load_query(q_at, mask, WIDEN)
    position = start + row - row_begin
    head_at = kv_head.to(tl.int64) * (TOKENS * HEAD_DIM)
    k_head, v_head = k_plane + head_at, v_plane + head_at
    table = tables + sequence * table_stride
    top, total = _softmax_begin(sinks, head, is_query, HAS_SINKS)
    values = tl.zeros((BLOCK_ROWS * BLOCK_SHARED, BLOCK_DIM), tl.float32)

    end = start + row_end - row_begin
    if IS_FULL:  # every row sees what the last one of its sequence does
        end = tl.load(tiles + tile * TILE_WORDS + 4)
        start = end - 1
    begin, all_begin, all_end = _ranges(start, end, window, BLOCK_KEYS, HAS_WINDOW)
    if HAS_WINDOW:
        top, total, values = _attend_keys(
            query, top, total, values, k_head, v_head, k_scales, v_scales, kv_head, table,
            plane_stride, begin, tl.minimum(all_begin, end), position, start, scale, softcap,
            window, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, TOKENS, HAS_SOFTCAP, HAS_WINDOW, WIDEN,
            CAUSAL_KEYS,
        )  # fmt: skip
    top, total, values = _attend_keys(
        query, top, total, values, k_head, v_head, k_scales, v_scales, kv_head, table,
        plane_stride, all_begin, all_end, position, start, scale, softcap, window, HEAD_DIM,
        BLOCK_DIM, BLOCK_KEYS, TOKENS, HAS_SOFTCAP, HAS_WINDOW, WIDEN, ALL_KEYS,
    )  # fmt: skip
    top, total, values = _attend_keys(
        query, top, total, values, k_head, v_head, k_scales, v_scales, kv_head, table,
        plane_stride, all_end, end, position, start, scale, softcap, window, HEAD_DIM, BLOCK_DIM,
        BLOCK_KEYS, TOKENS, HAS_SOFTCAP, HAS_WINDOW, WIDEN,
        KEYS_BELOW_END if IS_FULL else CAUSAL_KEYS,
    )  # fmt: skip
    out_at = out + row.to(tl.int64)[:, None] * out_stride + (head * HEAD_DIM)[:, None]
    values = values / total[:, None]
    tl.store(out_at + dim[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_begin(sinks, head, has_sink, HAS_SINKS: tl.constexpr):
    """Maximum and sum, in base 2, of a softmax that has seen no key: of its sink alone, where
    `has_sink`. `sinks [heads]` float32."""
    top = tl.full(head.shape, NO_SCORE, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if HAS_SINKS:
        top = tl.where(has_sink, tl.load(sinks + head, mask=has_sink, other=0.0) * LOG2_E, top)
        total = tl.where(has_sink, 1.0, 0.0)
    return top, total


@triton.jit
def _load_query(q_at, mask, WIDEN: tl.constexpr):
    query = tl.load(q_at, mask=mask, other=0.0)
    return query.to(tl.float32) if WIDEN else query


@triton.jit
def _ranges(start, end, window, BLOCK_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Keys of rows at positions [start, end): the first that any of them sees, rounded down, and
    the range [all_begin, all_end) that all of them see, which needs no mask."""
    begin = 0
    all_begin = 0
    all_end = (start + 1) // BLOCK_KEYS * BLOCK_KEYS
    if HAS_WINDOW:
        begin = tl.maximum(0, start - window + 1) // BLOCK_KEYS * BLOCK_KEYS
        all_begin = tl.cdiv(tl.maximum(0, end - window), BLOCK_KEYS) * BLOCK_KEYS
        all_end = tl.maximum(all_begin, all_end)
    return begin, all_begin, all_end


@triton.jit
def _attend_keys(
    query, top, total, values, k_head, v_head, k_scales, v_scales, kv_head, table, plane_stride,
    begin, end, position, start, scale, softcap, window, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, WIDEN: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end) to a running softmax in base 2.

    `top`, `total` float32 `[queries]` are its maximum and sum, `values` float32 `[queries,
    BLOCK_DIM]`; returns them. A query that has seen no key yet may hold anything finite in `total`
    and `values`: the first key that it sees scales that by zero.
    """
    dim, step = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_KEYS)
    first = begin + step
    # A step has whole blocks, so where its keys lie in theirs is the same in every step.
    place = ((first % TOKENS) * HEAD_DIM)[:, None] + dim[None, :]
    blocks_at = table + first // TOKENS
    # Block ids are read a step ahead, so that copies of keys and values need not wait for them.
    next_block = tl.load(blocks_at, mask=first < end, other=0)
    for at in tl.range(begin, end, BLOCK_KEYS):
        key = at + step
        is_key = key < end
        block_at = next_block.to(tl.int64) * plane_stride
        offset = block_at[:, None] + place
        num_blocks = (at + BLOCK_KEYS - begin) // TOKENS
        next_block = tl.load(blocks_at + num_blocks, mask=key + BLOCK_KEYS < end, other=0)
        if SEEN == CAUSAL_KEYS and HAS_WINDOW:
            # Blocks behind the first row's window may be gone.
            is_key = is_key & (key > start - window)
        k, v = _load_pair(k_head, v_head, offset, is_key, dim, HEAD_DIM, BLOCK_DIM, SEEN)
        if k_scales is not None:
            # The stride of codes is one of bytes, and scales are pairs.
            scale_at = block_at // 2 + kv_head * TOKENS + first % TOKENS
            k, v, k_factors = widened(k, v, k_scales + scale_at, v_scales + scale_at, is_key, query)
        elif WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if k_scales is not None:
            scores *= k_factors[None, :]
        factor = scale * LOG2_E
        if HAS_SOFTCAP:
            scores = _cap(scores * factor, softcap)
            factor = 1.0
        if SEEN == KEYS_BELOW_END:
            scores = tl.where(is_key[None, :], scores, NO_SCORE)
        elif SEEN == CAUSAL_KEYS:
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (key[None, :] > position[:, None] - window)
            # Scaled before the mask: rows that have seen no key yet subtract NO_SCORE from itself.
            # The compiler would fuse a product with that: 1e22 of rounding error, and exp2 of it.
            scores = tl.where(is_seen, scores * factor, NO_SCORE)
            factor = 1.0
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.dot(weights.to(v.dtype), v, values * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, values


@triton.jit
def _load_pair(
    k_head, v_head, offset, is_key, dim, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Keys and values `[keys, BLOCK_DIM]`, zero where there are none."""
    if SEEN == ALL_KEYS and HEAD_DIM == BLOCK_DIM:
        k, v = tl.load(k_head + offset), tl.load(v_head + offset)
    else:
        mask = (dim < HEAD_DIM)[None, :]
        if SEEN != ALL_KEYS:
            mask = is_key[:, None] & mask
        k = tl.load(k_head + offset, mask=mask, other=0.0)
        v = tl.load(v_head + offset, mask=mask, other=0.0)
    return k, v


@triton.jit
def _cap(scores, softcap):
    """softcap * tanh(scores / softcap), of scores in base 2 as their result."""
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), which no x makes overflow.
    power = tl.exp2(scores * (2.0 / softcap))
    return (softcap * LOG2_E) * (1.0 - 2.0 / (1.0 + power))


@triton.jit(do_not_specialize=["table_stride"])
def attend_generations(
    q, k_plane, v_plane, k_scales, v_scales, out, sinks, items, partial, partial_stats,
    num_finished, tables, plane_stride, q_stride, out_stride, table_stride, num_kv_heads, scale,
    softcap, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    JOINED_SPLITS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`attend_contexts` for one query of each sequence.

    Grid: a fixed number of programs that share the pairs of item and KV head evenly. `items` are
    those of `list_items`. The only item of a row writes `out`. Of several, each writes its maximum,
    sum and values to `partial_stats` and `partial`, and the one that finishes last joins them.
    `num_finished [rows, num_kv_heads]` int32 counts them; it is zero before and after a launch.
    """
    wait_for_previous(EARLY)
    num_pairs = tl.load(items) * num_kv_heads
    program = tl.program_id(0)
    num_programs = _even_programs(num_pairs, tl.num_programs(0))
    queries, dim = tl.arange(0, BLOCK_QUERIES), tl.arange(0, BLOCK_DIM)
    is_query = queries < NUM_SHARED
    row, sequence, begin, end, first, num_splits = _load_item(items, program // num_kv_heads)
    end_pair = tl.where(program < num_programs, num_pairs, 0)
    for at in range(program, end_pair, num_programs):
        item, kv_head = at // num_kv_heads, at % num_kv_heads
        next_item = (at + num_programs) // num_kv_heads  # its words arrive during this one
        following = _load_item(items, next_item)
        head = kv_head * NUM_SHARED + queries
        offset = (head * HEAD_DIM)[:, None] + dim[None, :]
        mask = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        token_row = row.to(tl.int64)
        query = _load_query(q + token_row * q_stride + offset, mask, WIDEN)
        head_at = kv_head.to(tl.int64) * (TOKENS * HEAD_DIM)
        # The first item of a row counts the sink.
        top, total = _softmax_begin(sinks, head, is_query & (item == first), HAS_SINKS)
        top, total, values = _attend_keys(
            query, top, total, tl.zeros((BLOCK_QUERIES, BLOCK_DIM), tl.float32), k_plane + head_at,
            v_plane + head_at, k_scales, v_scales, kv_head,
            tables + sequence.to(tl.int64) * table_stride, plane_stride, begin, end, 0, 0, scale,
            softcap, 0, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, TOKENS, HAS_SOFTCAP, False, WIDEN,
            KEYS_BELOW_END,
        )  # fmt: skip
        if num_splits == 1:
            average = (values / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
            tl.store(out + token_row * out_stride + offset, average, mask=mask)
        else:
            num_heads = num_kv_heads * NUM_SHARED
            line = item.to(tl.int64) * num_heads + head
            _store_part(
                partial + line[:, None] * BLOCK_DIM + dim[None, :], partial_stats + line * 2,
                top, total, values, is_query, mask,
            )  # fmt: skip
            counter = num_finished + row * num_kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                _join(
                    out + token_row * out_stride, partial, partial_stats, first, num_splits,
                    kv_head, num_heads, counter, HEAD_DIM, BLOCK_DIM, NUM_SHARED, BLOCK_SHARED,
                    JOINED_SPLITS,
                )  # fmt: skip
        row, sequence, begin, end, first, num_splits = following


@triton.jit
def _even_programs(num_pairs, num_programs):
    """The number of programs that work, chosen so that all have the same number of pairs unless few
    are left over. A last wave of a few programs would leave the memory idle."""
    rounds = tl.maximum(tl.cdiv(num_pairs, num_programs), 1)
    few_left = 4 * num_pairs <= 5 * num_programs
    return tl.where(few_left, num_programs, tl.cdiv(num_pairs, rounds))


@triton.jit
def _load_item(items, item):
    """Row, sequence, first key, end key, first item of the row, number of items of the row."""
    at = items + (1 + item) * ITEM_WORDS
    row, sequence, begin = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return row, sequence, begin, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _store_part(values_at, stats_at, top, total, values, is_query, mask):
    """Store the partial sums of an item, which may be counted as finished afterwards."""
    tl.store(values_at, values, mask=mask)
    tl.store(stats_at, top, mask=is_query)
    tl.store(stats_at + 1, total, mask=is_query)
    tl.debug_barrier()  # all threads have stored before one of them counts


@triton.jit
def _join(
    out_row, partial, partial_stats, first, num_splits, kv_head, num_heads, counter,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr, JOINED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the softmax over all items of a row for the heads that share a KV head, in order of
    keys, JOINED_SPLITS at a time, and reset the counter of the row. Other programs have just
    written the items, so loads bypass L1."""
    shared, dim = tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_DIM)
    is_head, is_dim = shared < NUM_SHARED, dim < HEAD_DIM
    head = kv_head * NUM_SHARED + shared
    top = tl.full((BLOCK_SHARED,), NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_SHARED,), tl.float32)
    values = tl.zeros((BLOCK_SHARED, BLOCK_DIM), tl.float32)
    for begin in range(0, num_splits, JOINED_SPLITS):
        new_top = top
        for i in tl.static_range(JOINED_SPLITS):
            mask = is_head & (begin + i < num_splits)
            line = (first + begin + i).to(tl.int64) * num_heads + head
            at = partial_stats + line * 2
            part_top = tl.load(at, mask=mask, other=NO_SCORE, cache_modifier=".cg")
            new_top = tl.maximum(new_top, part_top)
        shrink = tl.exp2(top - new_top)
        total, values = total * shrink, values * shrink[:, None]
        for i in tl.static_range(JOINED_SPLITS):
            mask = is_head & (begin + i < num_splits)
            line = (first + begin + i).to(tl.int64) * num_heads + head
            at = partial_stats + line * 2
            part_top = tl.load(at, mask=mask, other=NO_SCORE, cache_modifier=".cg")
            part_total = tl.load(at + 1, mask=mask, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partial + line[:, None] * BLOCK_DIM + dim[None, :],
                mask=mask[:, None] & is_dim[None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            weight = tl.exp2(part_top - new_top)
            total += weight * part_total
            values += weight[:, None] * part
        top = new_top
    average = values / tl.where(is_head, total, 1.0)[:, None]
    offset = (head * HEAD_DIM)[:, None] + dim[None, :]
    mask = is_head[:, None] & is_dim[None, :]
    tl.store(out_row + offset, average.to(out_row.dtype.element_ty), mask=mask)
    tl.store(counter, 0)


@triton.jit
def append(
    k, v, k_plane, v_plane, k_scales, v_scales, kv_slots, k_stride, v_stride, plane_stride,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write new keys and values to their positions in the cache. Grid: (token, KV head).

    `kv_slots [tokens]` int64: block * TOKENS + slot, or -1 for a padding row.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_slot = tl.load(kv_slots + token)
    dim = tl.arange(0, BLOCK_DIM)
    mask = (dim < HEAD_DIM) & (kv_slot >= 0)
    to = (kv_slot // TOKENS) * plane_stride + (head * TOKENS + kv_slot % TOKENS) * HEAD_DIM + dim
    row = head * HEAD_DIM + dim
    if k_scales is None:
        tl.store(k_plane + to, tl.load(k + token * k_stride + row, mask=mask), mask=mask)
        tl.store(v_plane + to, tl.load(v + token * v_stride + row, mask=mask), mask=mask)
    else:
        one = tl.arange(0, 1)
        is_head = (kv_slot >= 0) & (one == 0)
        scale_at = (kv_slot // TOKENS) * (plane_stride // 2) + head * TOKENS + kv_slot % TOKENS
        key = tl.load(k + token * k_stride + row, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + row, mask=mask, other=0.0).to(tl.float32)
        mask, to = mask[None, :], to[None, :]
        store_codes(key[None, :], k_plane + to, k_scales + scale_at + one, is_head, mask)
        store_codes(value[None, :], v_plane + to, v_scales + scale_at + one, is_head, mask)
