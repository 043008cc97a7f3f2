"""Triton programs of the low-rank update of long runs, whose tiles of rows use one adapter.

`tiles [1 + tiles, LONG_WORDS]`, int32, is made by `long_runs.tile_words`. Row 0 holds the number of
tiles, which follow it: slot, first row, end row, bits of the coefficient, and number of the tile's
first block. A block `[BLOCK_ROWS, BLOCK_RANKS]`, float32, is the intermediate of as many rank rows,
where the groups of all parts of a site are counted one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex_services.worker.ops.lora.triton_kernels import part_of
from loraplex_services.worker.ops.lora.triton_lists import (
    A_WORD,
    B_WORD,
    BIAS_WORD,
    COLUMNS_WORD,
    GAIN_WORD,
    GROUP_ROWS,
    INDEX_WORDS,
    INPUTS_WORD,
    LORA_BIAS_WORD,
    NO_ROW,
    OUTPUTS_WORD,
    SCALES_WORD,
    SIZE_WORD,
    STRIDES_WORD,
    WORDS,
    add_product,
    aligned,
    as_pair,
    choose,
    high_word,
    low_word,
)

LONG_WORDS = tl.constexpr(8)
"""Words that describe a tile."""
PLAIN_GROUPS = tl.constexpr(16)
"""Groups of an adapter in a part, at most, whose rank rows are counted without gaps."""


@triton.jit
def _load_tile(tiles, tile):
    """Slot, first row, end row, coefficient and first block of a tile."""
    word = tiles + (tile + 1) * LONG_WORDS
    coef = tl.load(word + 3).to(tl.float32, bitcast=True)
    slot, block = tl.load(word).to(tl.int64), tl.load(word + 4).to(tl.int64)
    return slot, tl.load(word + 1), tl.load(word + 2), coef, block


@triton.jit
def _group_ends(of_slot, NUM_PARTS: tl.constexpr):
    """Where the groups of each part of a site end, counted one part after another."""
    end_1 = tl.load(of_slot + 1)
    end_2, end_3, end_4 = end_1, end_1, end_1
    if NUM_PARTS > 1:
        end_2 = end_1 + tl.load(of_slot + INDEX_WORDS + 1)
        end_3, end_4 = end_2, end_2
    if NUM_PARTS > 2:
        end_3 = end_2 + tl.load(of_slot + 2 * INDEX_WORDS + 1)
        end_4 = end_3
    if NUM_PARTS > 3:
        end_4 = end_3 + tl.load(of_slot + 3 * INDEX_WORDS + 1)
    return end_1, end_2, end_3, end_4


@triton.jit(do_not_specialize=["first_part", "num_parts", "num_chunks"])
def shrink_long(
    x, arena, partial, h, tickets, tiles, index, records, first_part, num_parts, num_inputs,
    x_stride, num_chunks,
    NUM_PARTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    HAS_CUTS: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """h = coef * scale * A x of one site, for all groups of each tile's adapter.

    Grid: any number of programs. `num_chunks` of them share the rank rows of a tile and a split.
    """
    GROUPS: tl.constexpr = BLOCK_RANKS // GROUP_ROWS
    num_tiles = tl.load(tiles)
    num_items = num_tiles * SPLITS
    for item in range(tl.program_id(0), num_items * num_chunks, tl.num_programs(0)):
        first_chunk, split, tile = item // num_items, item % SPLITS, item % num_items // SPLITS
        slot, begin, end, coef, block = _load_tile(tiles, tile)
        of_slot = index + (slot * num_parts + first_part) * INDEX_WORDS
        end_1, end_2, end_3, end_4 = _group_ends(of_slot, NUM_PARTS)
        for chunk in range(first_chunk, tl.cdiv(end_4, GROUPS), num_chunks):
            r = tl.arange(0, BLOCK_RANKS)
            number, lane = r // GROUP_ROWS + chunk * GROUPS, r % GROUP_ROWS
            is_group = number < end_4
            local = (number >= end_1).to(tl.int32) + (number >= end_2) + (number >= end_3)
            first = tl.load(of_slot + local * INDEX_WORDS, mask=is_group, other=0).to(tl.int64)
            record = records + (first + number - choose(local, 0, end_1, end_2, end_3)) * WORDS
            size = tl.load(record + SIZE_WORD, mask=is_group, other=0)
            is_rank = lane < low_word(size)
            total = _partial_rows(
                x, arena, record, is_group, is_rank, lane, begin, end, split * SPLIT_INPUTS,
                num_inputs, x_stride, SPLIT_INPUTS, BLOCK_ROWS, BLOCK_RANKS, BLOCK_INPUTS, HAS_CUTS,
                WIDEN, ALIGN, STAGES,
            )  # fmt: skip
            factor = coef * high_word(size).to(tl.float32, bitcast=True)
            if INT8:
                scales = tl.load(record + SCALES_WORD, mask=is_group, other=0)
                scales = scales.to(tl.pointer_type(tl.float32))
                factor *= tl.load(scales + lane, mask=is_rank, other=0.0)
            numbers: tl.constexpr = BLOCK_ROWS * BLOCK_RANKS
            spot = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_RANKS + r[None, :]
            at = (block * NUM_PARTS + chunk) * numbers
            if SPLITS == 1:
                tl.store(h + at + spot, total * factor[None, :], mask=is_group[None, :])
            else:
                lines = partial + at * SPLITS
                tl.store(lines + split * numbers + spot, total, mask=is_group[None, :])
                tl.debug_barrier()
                ticket = tickets + block * NUM_PARTS + chunk
                if tl.atomic_add(ticket, 1, sem="acq_rel") == SPLITS - 1:
                    # The program that counts last adds all partial sums, always in the same order.
                    # It resets the ticket for the next launch.
                    tl.store(ticket, 0)
                    total = tl.load(lines + spot, mask=is_group[None, :], other=0.0)
                    for p in range(1, SPLITS):
                        total += tl.load(
                            lines + p * numbers + spot, mask=is_group[None, :], other=0.0
                        )
                    tl.store(h + at + spot, total * factor[None, :], mask=is_group[None, :])


@triton.jit
def _partial_rows(
    x, arena, record, is_group, is_rank, lane, begin, end, in_begin, num_inputs, x_stride,
    SPLIT_INPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr, HAS_CUTS: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x A^T over one split of the inputs, `[BLOCK_ROWS, BLOCK_RANKS]`."""
    row = begin + tl.arange(0, BLOCK_ROWS)
    is_row = row < end
    x_rows = x + row.to(tl.int64) * x_stride
    strides = tl.load(record + STRIDES_WORD, mask=is_group, other=0)
    a_stride = aligned(low_word(strides), ALIGN)
    a_rows = aligned(tl.load(record + A_WORD, mask=is_group, other=0), ALIGN) + lane * a_stride
    if HAS_CUTS:
        cut = tl.load(record + INPUTS_WORD, mask=is_group, other=0)
        cut_begin, cut_end = cut & 0x7FFFFFFF, cut >> 32  # in 32 bits, Triton 3.6 fails to compile
        a_rows -= cut_begin
    in_end = aligned(tl.minimum(in_begin + SPLIT_INPUTS, num_inputs), ALIGN)
    total = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), tl.float32)
    for at in tl.range(in_begin, in_end, BLOCK_INPUTS, num_stages=STAGES):
        k = at + tl.arange(0, BLOCK_INPUTS)
        is_input = k < in_end
        x_mask = is_row[:, None] & is_input[None, :]
        x_tile = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0)
        a_mask = is_rank[None, :] & is_input[:, None]
        if HAS_CUTS:
            a_mask = a_mask & (k[:, None] >= cut_begin[None, :])
            a_mask = a_mask & (k[:, None] < cut_end[None, :])
        a_tile = tl.load(arena + a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
        total = add_product(total, x_tile, a_tile, WIDEN)
    return total


@triton.jit(
    do_not_specialize=["first_part", "num_parts", "end_0", "end_1", "end_2", "end_3", "span"]
)
def expand_long(
    y, arena, vector_arena, h, tiles, index, records, first_part, num_parts, end_0, end_1, end_2,
    end_3, y_stride, span,
    NUM_PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    H_RANKS: tl.constexpr, HAS_CUTS: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y = gain * (y + B h + coef * bias of B) + bias delta.

    Grid: any number of programs, each of which has `span` neighbouring outputs of one part at a
    time, a multiple of BLOCK_OUTPUTS.
    """
    num_tiles = tl.load(tiles)
    num_spans = tl.cdiv(end_0, span) + tl.cdiv(end_1 - end_0, span)
    num_spans += tl.cdiv(end_2 - end_1, span) + tl.cdiv(end_3 - end_2, span)
    for item in range(tl.program_id(0), num_tiles * num_spans, tl.num_programs(0)):
        slot, row_begin, row_end, coef, block = _load_tile(tiles, item % num_tiles)
        local, number, begin, end = part_of(item // num_tiles, end_0, end_1, end_2, end_3, span)
        of_slot = index + (slot * num_parts + first_part) * INDEX_WORDS
        groups_1, groups_2, groups_3, groups_4 = _group_ends(of_slot, NUM_PARTS)
        before = choose(local, 0, groups_1, groups_2, groups_3)
        num_groups = choose(local, groups_1, groups_2, groups_3, groups_4) - before
        of_part = of_slot + local * INDEX_WORDS
        num_vectors = tl.load(of_part + 3)
        groups = records + tl.load(of_part).to(tl.int64) * WORDS
        vectors = records + tl.load(of_part + 2).to(tl.int64) * WORDS
        h_tile = h + block * (NUM_PARTS * BLOCK_ROWS * H_RANKS)
        first, last = number * span, tl.minimum(number * span + span, end - begin)
        # Most adapters need no inner loop, without which loads are pipelined.
        sizes, _ = _group_sizes(groups, num_groups)
        num_ranks = tl.sum(sizes, axis=0)
        is_plain = (num_groups <= PLAIN_GROUPS) & (num_vectors == 0)
        if (num_ranks == 0) & (num_vectors == 0):
            pass
        elif is_plain & (num_ranks <= 16):
            _expand_span(
                y, arena, vector_arena, h_tile, before, groups, num_groups, vectors,
                num_vectors, coef, first, last, begin, row_begin, row_end, y_stride,
                BLOCK_ROWS, BLOCK_OUTPUTS, 16, H_RANKS, True, HAS_CUTS, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
        elif is_plain & (num_ranks <= 64):
            _expand_span(
                y, arena, vector_arena, h_tile, before, groups, num_groups, vectors,
                num_vectors, coef, first, last, begin, row_begin, row_end, y_stride,
                BLOCK_ROWS, BLOCK_OUTPUTS, 64, H_RANKS, True, HAS_CUTS, WIDEN, ALIGN, 2,
            )  # fmt: skip
        else:
            _expand_span(
                y, arena, vector_arena, h_tile, before, groups, num_groups, vectors,
                num_vectors, coef, first, last, begin, row_begin, row_end, y_stride,
                BLOCK_ROWS, BLOCK_OUTPUTS, 16, H_RANKS, False, HAS_CUTS, WIDEN, ALIGN, 1,
            )  # fmt: skip


@triton.jit
def _expand_span(
    y, arena, vector_arena, h, before, groups, num_groups, vectors, num_vectors, coef, first, last,
    begin, row_begin, row_end, y_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    H_RANKS: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_CUTS: tl.constexpr, WIDEN: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs [first, last) of a part for the rows of a tile. IS_PLAIN: the adapter has at most
    BLOCK_RANKS rank rows and no vectors."""
    row = tl.arange(0, BLOCK_ROWS)
    first, last = aligned(first, ALIGN), aligned(last, ALIGN)
    y_rows = y + (row_begin.to(tl.int64) * y_stride + aligned(begin, ALIGN))
    y_rows += row[:, None] * y_stride
    b_rows, cut, is_rank, high, low = _load_ranks(
        h, before, groups, 0, num_groups, BLOCK_ROWS, BLOCK_RANKS, H_RANKS, IS_PLAIN,
        y.dtype.element_ty, HAS_CUTS, ALIGN,
    )  # fmt: skip
    for at in tl.range(first, last, BLOCK_OUTPUTS, num_stages=STAGES):
        column = at + tl.arange(0, BLOCK_OUTPUTS)
        mask = (row < row_end - row_begin)[:, None] & (column < last)[None, :]
        total = tl.load(y_rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
        b = _load_columns(arena, b_rows, cut, is_rank, column, last, HAS_CUTS)
        total = _add_rows(total, high, low, b, WIDEN)
        if not IS_PLAIN:
            for rank in range(BLOCK_RANKS, num_groups * GROUP_ROWS, BLOCK_RANKS):
                more_b_rows, more_cut, is_more, more_high, more_low = _load_ranks(
                    h, before, groups, rank, num_groups, BLOCK_ROWS, BLOCK_RANKS, H_RANKS, IS_PLAIN,
                    y.dtype.element_ty, HAS_CUTS, ALIGN,
                )  # fmt: skip
                b = _load_columns(arena, more_b_rows, more_cut, is_more, column, last, HAS_CUTS)
                total = _add_rows(total, more_high, more_low, b, WIDEN)
            if num_vectors > 0:
                gain, added, bias = _load_vectors(vector_arena, vectors, num_vectors, column)
                total = gain[None, :] * (total + coef * added[None, :]) + bias[None, :]
        tl.store(y_rows + column[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_ranks(
    h, before, groups, rank, num_groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, H_RANKS: tl.constexpr,
    IS_PLAIN: tl.constexpr, DTYPE: tl.constexpr, HAS_CUTS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where rows of B begin from rank row `rank` of a part on, the outputs that they have, which
    of them there are, and their intermediate: see `as_pair`. Groups follow each other without gaps
    where IS_PLAIN, else each has 16 rows."""
    k = rank + tl.arange(0, BLOCK_RANKS)
    if IS_PLAIN:
        sizes, ends = _group_sizes(groups, num_groups)
        is_before = k[:, None] >= ends[None, :]
        group = tl.sum(is_before.to(tl.int32), axis=1)
        lane = k - tl.sum(tl.where(is_before, sizes[None, :], 0), axis=1)
    else:
        group, lane = k // GROUP_ROWS, k % GROUP_ROWS
    record, is_group = groups + group * WORDS, group < num_groups
    is_rank = lane < low_word(tl.load(record + SIZE_WORD, mask=is_group, other=0))
    b_stride = high_word(tl.load(record + STRIDES_WORD, mask=is_group, other=0))
    b_rows = tl.load(record + B_WORD, mask=is_group, other=0)
    b_rows = aligned(b_rows, ALIGN) + lane * aligned(b_stride, ALIGN)
    cut = b_rows
    if HAS_CUTS:
        cut = tl.load(record + OUTPUTS_WORD, mask=is_group, other=0)
    r = (before + group) * GROUP_ROWS + lane
    spot = r // H_RANKS * (BLOCK_ROWS * H_RANKS) + r % H_RANKS
    pointers = h + spot[None, :] + tl.arange(0, BLOCK_ROWS)[:, None] * H_RANKS
    high, low = as_pair(tl.load(pointers, mask=is_rank[None, :], other=0.0), DTYPE)
    return b_rows, cut, is_rank, high, low


@triton.jit
def _group_sizes(groups, num_groups):
    """Rank rows of the first groups of a part, and the sums over each and those before it."""
    g = tl.arange(0, PLAIN_GROUPS)
    sizes = low_word(tl.load(groups + g * WORDS + SIZE_WORD, mask=g < num_groups, other=0))
    return sizes, tl.cumsum(sizes, axis=0)


@triton.jit
def _load_columns(arena, b_rows, cut, is_rank, column, last, HAS_CUTS: tl.constexpr):
    """Rows of B at some outputs."""
    mask = is_rank[:, None] & (column < last)[None, :]
    if HAS_CUTS:
        mask = mask & (column[None, :] >= low_word(cut)[:, None])
        mask = mask & (column[None, :] < high_word(cut)[:, None])
    return tl.load(arena + b_rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _add_rows(total, high, low, b, WIDEN: tl.constexpr):
    """total + (high + low) b."""
    total = add_product(total, high, b, WIDEN)
    if high.dtype != tl.float32:
        total = add_product(total, low, b, WIDEN)
    return total


@triton.jit
def _load_vectors(vector_arena, vectors, num_vectors, column):
    """Gain, bias of B and bias delta of an adapter's outputs. Its records cover different ones."""
    gain = tl.full(column.shape, 1.0, tl.float32)
    added, bias = tl.zeros(column.shape, tl.float32), tl.zeros(column.shape, tl.float32)
    for v in range(num_vectors):
        vector = vectors + v * WORDS
        cut = tl.load(vector + COLUMNS_WORD)
        is_column = (column >= low_word(cut)) & (column < high_word(cut))
        at = tl.load(vector + GAIN_WORD)
        gain = tl.load(vector_arena + at + column, mask=is_column & (at > NO_ROW), other=gain)
        at = tl.load(vector + LORA_BIAS_WORD)
        added = tl.load(vector_arena + at + column, mask=is_column & (at > NO_ROW), other=added)
        at = tl.load(vector + BIAS_WORD)
        bias = tl.load(vector_arena + at + column, mask=is_column & (at > NO_ROW), other=bias)
    return gain, added, bias
