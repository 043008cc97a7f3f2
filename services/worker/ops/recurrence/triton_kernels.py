"""Triton kernels of the gated delta net: see README.

A program finds the cells of a sequence's state through the numbers of its blocks. All arithmetic is
float32; what comes from projections may be narrower.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cells(blocks, cell, BLOCK_CELLS: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
           CELL_ITEMS: tl.constexpr, mask):  # fmt: skip
    """The item of the arena at which each of some cells of a state begins, where it has blocks."""
    block = tl.load(blocks + cell // BLOCK_CELLS, mask=mask, other=0)
    return block * BLOCK_ITEMS + cell % BLOCK_CELLS * CELL_ITEMS


@triton.jit
def _items(blocks, first_cell, item, BLOCK_CELLS: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
           CELL_ITEMS: tl.constexpr, mask):  # fmt: skip
    """Where in the arena items of the cells from `first_cell` on lie."""
    cell = first_cell + item // CELL_ITEMS
    return _cells(blocks, cell, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, mask) + item % CELL_ITEMS


@triton.jit(do_not_specialize=["first_row", "first_cell"])
def convolve(
    mixed, x, taps, arena, row_ends, words, sources, targets, first_row, first_cell, x_stride,
    CHANNELS: tl.constexpr, NUM_TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr,
    STATE_BLOCKS: tl.constexpr, BLOCK_CELLS: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
    CELL_ITEMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of channels). mixed = silu(convolution of x), and the last inputs go to
    the state, those of the span before among them. `first_cell`: of the convolution."""
    row = first_row + tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < CHANNELS
    before: tl.constexpr = NUM_TAPS - 1
    first_span = tl.load(row_ends + row - 1, mask=row > 0, other=0)
    for span in range(first_span, tl.load(row_ends + row)):
        begin, end = tl.load(words + 2 * span), tl.load(words + 2 * span + 1)
        source, target = sources + span * STATE_BLOCKS, targets + span * STATE_BLOCKS
        has_source = tl.load(source) >= 0
        for first in range(begin, end, BLOCK_TOKENS):
            token = first + tl.arange(0, BLOCK_TOKENS)
            total = tl.zeros((BLOCK_TOKENS, BLOCK_CHANNELS), tl.float32)
            for i in tl.static_range(NUM_TAPS):
                at = token - before + i
                is_new = (at >= begin) & (at < end)
                value = tl.load(
                    x + at[:, None] * x_stride + channel[None, :],
                    mask=is_new[:, None] & is_channel[None, :],
                    other=0.0,
                ).to(tl.float32)
                if first == begin:
                    is_old = (at < begin)[:, None] & is_channel[None, :] & has_source
                    item = (at - begin + before)[:, None] * CHANNELS + channel[None, :]
                    offset = _items(
                        source, first_cell, item, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, is_old
                    )
                    value += tl.load(arena + offset, mask=is_old, other=0.0)
                taps_at = taps + channel * NUM_TAPS + i
                total += value * tl.load(taps_at, mask=is_channel, other=0.0)[None, :]
            tl.store(
                mixed + token[:, None] * CHANNELS + channel[None, :],
                total / (1.0 + tl.exp(-total)),
                mask=(token < end)[:, None] & is_channel[None, :],
            )
        i = tl.arange(0, BLOCK_TAPS)
        at = end - before + i
        is_kept = (i < before)[:, None] & is_channel[None, :] & (begin < end)
        value = tl.load(
            x + at[:, None] * x_stride + channel[None, :],
            mask=is_kept & (at >= begin)[:, None],
            other=0.0,
        ).to(tl.float32)
        is_old = is_kept & (at < begin)[:, None] & has_source
        item = (at - begin + before)[:, None] * CHANNELS + channel[None, :]
        offset = _items(source, first_cell, item, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, is_old)
        value += tl.load(arena + offset, mask=is_old, other=0.0)
        is_kept &= tl.load(target) >= 0
        item = i[:, None] * CHANNELS + channel[None, :]
        offset = _items(target, first_cell, item, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, is_kept)
        tl.debug_barrier()  # the state may be updated in place: all threads have read it
        tl.store(arena + offset, value, mask=is_kept)
        tl.debug_barrier()  # the next span reads what was written


@triton.jit
def _decays(a, b, rates, step_bias, token, is_token, head, a_stride, b_stride):
    """The logarithm of what each token leaves of the state, and its weight beta; 0 for none."""
    step = tl.load(a + token * a_stride + head, mask=is_token, other=0.0).to(tl.float32)
    step += tl.load(step_bias + head)
    # log(1 + x) is exact to rounding if it is multiplied by x over what was added to 1.
    x = tl.exp(-tl.abs(step))
    added = 1.0 + x - 1.0
    log = tl.where(added == 0.0, x, tl.log(1.0 + x) * (x / tl.where(added == 0.0, 1.0, added)))
    softplus = tl.maximum(step, 0.0) + log
    gate = tl.load(b + token * b_stride + head, mask=is_token, other=0.0).to(tl.float32)
    decay = tl.where(is_token, tl.load(rates + head) * softplus, 0.0)
    return decay, tl.where(is_token, 1.0 / (1.0 + tl.exp(-gate)), 0.0)


@triton.jit
def _head_rows(x, i, num_tokens, key, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr,
               BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Rows `i`, `[tokens, key width]`, of one head of keys or queries."""
    is_own = (i < num_tokens)[:, None]
    if KEY_DIM < BLOCK_KEYS:
        is_own &= (key < KEY_DIM)[None, :]
    return tl.load(x + (i[:, None] * CHANNELS + key[None, :]), mask=is_own, other=0.0)


@triton.jit(do_not_specialize=["first_span", "first_cell"])
def step(
    out, mixed, a, b, rates, step_bias, arena, words, sources, targets, first_span, first_cell,
    a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, STATE_BLOCKS: tl.constexpr, BLOCK_CELLS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of values, value heads, spans). One token of each span, or none."""
    head, span = tl.program_id(1), first_span + tl.program_id(2)
    token = tl.load(words + 2 * span)
    if token >= tl.load(words + 2 * span + 1):
        return
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    CELL_ITEMS: tl.constexpr = KEY_DIM * VALUE_DIM
    key = tl.arange(0, BLOCK_KEYS)
    value = tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    queries = mixed + token * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    q = tl.load(queries + key, mask=is_key, other=0.0)
    k = tl.load(queries + KEY_HEADS * KEY_DIM + key, mask=is_key, other=0.0)
    q *= KEY_DIM**-0.5 / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
    k /= tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    values = mixed + token * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    v = tl.load(values + value, mask=is_value, other=0.0)
    decay, beta = _decays(a, b, rates, step_bias, token, True, head, a_stride, b_stride)
    source, target = sources + span * STATE_BLOCKS, targets + span * STATE_BLOCKS
    cell, items = first_cell + head, key[:, None] * VALUE_DIM + value[None, :]
    is_item = is_key[:, None] & is_value[None, :]
    has_source, has_target = tl.load(source) >= 0, tl.load(target) >= 0
    offset = _cells(source, cell, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, has_source)
    state = tl.load(arena + offset + items, mask=is_item & has_source, other=0.0) * tl.exp(decay)
    correction = beta * (v - tl.sum(k[:, None] * state, axis=0))
    state += k[:, None] * correction[None, :]
    y = tl.sum(q[:, None] * state, axis=0)
    tl.store(
        out + (token * VALUE_HEADS + head) * VALUE_DIM + value,
        y.to(out.dtype.element_ty),
        mask=is_value,
    )
    offset = _cells(target, cell, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, has_target)
    tl.store(arena + offset + items, state, mask=is_item & has_target)


@triton.jit
def _inverse(system, i, CHUNK: tl.constexpr):
    """The inverse of 1 + the transposed `system`, which is strictly upper: a column of it scales
    rows of the result without being transposed."""
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(i[None, :] == row, system, 0.0), axis=1)
        known = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(i[:, None] == row, inverse - known[None, :], inverse)
    return inverse


@triton.jit
def solve_chunks(
    solutions, weights, scales, mixed, a, b, rates, step_bias, words, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks of the longest span, value heads, spans). What a chunk's outputs need besides
    the state: the inverse of its triangular system times diag(beta), and the weights of its
    corrections. Row t of both, `[T, value heads, CHUNK]`, belongs to token t. `scales`,
    `[T, value heads, 2]`, bring keys to length 1 and queries to 1 / sqrt(KEY_DIM)."""
    head, span = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(words + 2 * span), tl.load(words + 2 * span + 1)
    first = begin + tl.program_id(0) * CHUNK
    if first >= end:
        return
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    i, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEYS)
    num_tokens = tl.minimum(end - first, CHUNK).to(tl.int32)
    is_token = i < num_tokens
    queries = mixed + first * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    keys = queries + KEY_HEADS * KEY_DIM
    k = _head_rows(keys, i, num_tokens, key, KEY_DIM, CHANNELS, BLOCK_KEYS)
    k_scale = 1.0 / tl.sqrt(tl.sum(k * k, axis=1) + 1e-6)
    k *= k_scale[:, None]
    first_row = first * VALUE_HEADS + head
    scale = scales + first_row * 2 + i * (VALUE_HEADS * 2)
    tl.store(scale, k_scale, mask=is_token)
    a, b = a + first * a_stride, b + first * b_stride
    decay, beta = _decays(a, b, rates, step_bias, i, is_token, head, a_stride, b_stride)
    sums = tl.cumsum(decay, axis=0)
    is_later = i[:, None] < i[None, :]
    left = tl.exp(tl.where(is_later, sums[None, :] - sums[:, None], float("-inf")))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * left * beta[None, :]
    inverse = _inverse(system, i, CHUNK)
    pair_offsets = first_row * CHUNK + (i[:, None] * (VALUE_HEADS * CHUNK) + i[None, :])
    tl.store(solutions + pair_offsets, inverse * beta[None, :], mask=is_token[:, None])
    q = _head_rows(queries, i, num_tokens, key, KEY_DIM, CHANNELS, BLOCK_KEYS)
    q_scale = KEY_DIM**-0.5 / tl.sqrt(tl.sum(q * q, axis=1) + 1e-6)
    tl.store(scale + 1, q_scale, mask=is_token)
    weight = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_scale[:, None]
    is_seen = i[:, None] >= i[None, :]
    left = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], float("-inf")))
    tl.store(weights + pair_offsets, weight * left, mask=is_token[:, None])


@triton.jit(do_not_specialize=["first_cell"])
def advance_chunks(
    out, solutions, weights, scales, mixed, a, b, rates, step_bias, arena, row_ends, words, sources,
    targets, first_cell, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, STATE_BLOCKS: tl.constexpr, BLOCK_CELLS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of values, value heads, rows). A row's state stays in registers."""
    head, row = tl.program_id(1), tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    CELL_ITEMS: tl.constexpr = KEY_DIM * VALUE_DIM
    key, i = tl.arange(0, BLOCK_KEYS), tl.arange(0, CHUNK)
    value = tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    queries, is_value = mixed + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM, value < VALUE_DIM
    values = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    cell, items = first_cell + head, key[:, None] * VALUE_DIM + value[None, :]
    is_item = (key < KEY_DIM)[:, None] & is_value[None, :]
    first_span = tl.load(row_ends + row - 1, mask=row > 0, other=0)
    source = sources + first_span * STATE_BLOCKS
    has_source = tl.load(source) >= 0
    offset = _cells(source, cell, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, has_source)
    state = tl.load(arena + offset + items, mask=is_item & has_source, other=0.0)
    for span in range(first_span, tl.load(row_ends + row)):
        begin, end = tl.load(words + 2 * span), tl.load(words + 2 * span + 1)
        for first in range(begin, end, CHUNK):
            num_tokens, token = tl.minimum(end - first, CHUNK).to(tl.int32), first + i
            is_token = i < num_tokens
            is_own = is_token[:, None] & is_value[None, :]
            decay, _ = _decays(a, b, rates, step_bias, token, is_token, head, a_stride, b_stride)
            sums = tl.cumsum(decay, axis=0)
            first_row = first * VALUE_HEADS + head
            scale = scales + first_row * 2 + i * (VALUE_HEADS * 2)
            k_scale = tl.load(scale, mask=is_token, other=0.0)
            chunk = queries + first * CHANNELS
            k = _head_rows(
                chunk + KEY_HEADS * KEY_DIM, i, num_tokens, key, KEY_DIM, CHANNELS, BLOCK_KEYS
            )
            offsets = i[:, None] * CHANNELS + value[None, :]
            wanted = tl.load(values + first * CHANNELS + offsets, mask=is_own, other=0.0)
            known = tl.dot(k, state, input_precision=PRECISION)
            wanted -= (k_scale * tl.exp(sums))[:, None] * known
            pair_offsets = first_row * CHUNK + (i[:, None] * (VALUE_HEADS * CHUNK) + i[None, :])
            solution = tl.load(solutions + pair_offsets, mask=is_token[:, None], other=0.0)
            correction = tl.dot(solution, wanted, input_precision=PRECISION)
            q = _head_rows(chunk, i, num_tokens, key, KEY_DIM, CHANNELS, BLOCK_KEYS)
            q_scale = tl.load(scale + 1, mask=is_token, other=0.0) * tl.exp(sums)
            y = tl.dot(q, state, input_precision=PRECISION) * q_scale[:, None]
            weight = tl.load(weights + pair_offsets, mask=is_token[:, None], other=0.0)
            y = tl.dot(weight, correction, y, input_precision=PRECISION)
            to = out + first_row * VALUE_DIM + i[:, None] * (VALUE_HEADS * VALUE_DIM)
            tl.store(to + value[None, :], y.to(out.dtype.element_ty), mask=is_own)
            total = tl.sum(decay, axis=0)
            correction *= (k_scale * tl.exp(total - sums))[:, None]
            state *= tl.exp(total)
            state = tl.dot(tl.trans(k), correction, state, input_precision=PRECISION)
        target = targets + span * STATE_BLOCKS
        has_target = (tl.load(target) >= 0) & (begin < end)
        offset = _cells(target, cell, BLOCK_CELLS, BLOCK_ITEMS, CELL_ITEMS, has_target)
        tl.store(arena + offset + items, state, mask=is_item & has_target)
