"""Triton programs of the low-rank update. Data structures and grids: README.md.

An adapter's rank rows come in groups of at most 16. A step lists, for each part of each site, the
groups of its adapters: their token rows, and where their rows of A and B lie. The update of a part
is then one product over all listed rank rows,

    y[t, o] += sum over groups g and rank rows r of h[g, r, t] * B[g, r, o]

in which h is zero wherever token t does not use the adapter of group g. It has the form of a base
product with a longer inner dimension, so both may share one launch and one accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex_services.worker.ops.lora.triton_lists import (
    A_WORD,
    BIAS_WORD,
    COEF_WORD,
    COLUMNS_WORD,
    GAIN_WORD,
    GROUP_ROWS,
    INPUTS_WORD,
    LORA_BIAS_WORD,
    NO_ROW,
    OUTPUTS_WORD,
    ROWS_WORD,
    SCALES_WORD,
    SIZE_WORD,
    STRIDES_WORD,
    TILE_NUMBERS,
    TILE_ROWS,
    VECTOR_ROWS_WORD,
    WORDS,
    add_product,
    aligned,
    as_pair,
    choose,
    high_word,
    low_word,
)

SHARES = tl.constexpr(4)
"""Warps of a program that computes intermediates; each sums over a share of a block's inputs."""


@triton.jit(
    do_not_specialize=[
        "first_part", "max_groups", "max_tiles", "max_vectors", "num_shrink", "num_rows",
        "num_row_tiles", "end_0", "end_1", "end_2", "end_3",
    ]
)  # fmt: skip
def update_site(
    y, x, weight, arena, vector_arena, partial, h, entries, lanes, counts, tile_ends, vectors,
    tickets, done, first_part, max_groups, max_tiles, end_0, end_1, end_2, end_3, num_rows,
    num_inputs, x_stride, y_stride, num_shrink, num_row_tiles, max_vectors,
    NUM_PARTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    BLOCK_SHRINK: tl.constexpr, SHRINKS: tl.constexpr, EXPANDS: tl.constexpr,
    HAS_CUTS: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr, SHRINK_STAGES: tl.constexpr,
):  # fmt: skip
    """y += the update of one site; a launch that both SHRINKS and EXPANDS first computes the base's
    product, y = W x.

    Grid: `num_shrink` programs that compute h, then one for each tile of outputs and rows. Those of
    a launch that does both wait for the groups of their part. They cannot wait forever: programs
    start in the order of their numbers, so all that shrink are running or done.
    """
    pid = tl.program_id(0)
    if SHRINKS:
        if pid < num_shrink:
            _shrink_groups(
                x, arena, partial, h, entries, counts, tickets, done, pid, num_shrink, first_part,
                max_groups, num_inputs, x_stride, NUM_PARTS, SPLITS, SPLIT_INPUTS, BLOCK_SHRINK,
                EXPANDS, HAS_CUTS, INT8, WIDEN, ALIGN, SHRINK_STAGES,
            )  # fmt: skip
    if EXPANDS:
        if pid >= num_shrink:
            _expand_tile(
                y, x, weight, arena, vector_arena, h, entries, lanes, counts, tile_ends, vectors,
                done, pid - num_shrink, first_part, max_groups, max_tiles, end_0, end_1, end_2,
                end_3, num_rows, num_inputs, x_stride, y_stride, num_row_tiles, max_vectors,
                BLOCK_OUTPUTS, BLOCK_INPUTS, BLOCK_RANKS, SHRINKS, HAS_CUTS, WIDEN, ALIGN, STAGES,
            )  # fmt: skip


@triton.jit
def _shrink_groups(
    x, arena, partial, h, entries, counts, tickets, done, pid, num_programs, first_part, max_groups,
    num_inputs, x_stride,
    NUM_PARTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_INPUTS: tl.constexpr,
    BLOCK_SHRINK: tl.constexpr, TELLS: tl.constexpr, HAS_CUTS: tl.constexpr, INT8: tl.constexpr,
    WIDEN: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h[g, r, t] = factor * sum over inputs of A[r] x[t], for the groups of a site. An item is a
    split of a group; items with the same number of a group follow one another."""
    counts += first_part * 2
    count_0 = tl.load(counts)
    count_1 = tl.load(counts + 2) if NUM_PARTS > 1 else count_0
    count_2 = tl.load(counts + 4) if NUM_PARTS > 2 else count_0
    count_3 = tl.load(counts + 6) if NUM_PARTS > 3 else count_0
    # The next entry is loaded before it is known whether there is one.
    item = pid
    entry = _entry_of(item, entries, first_part, max_groups, NUM_PARTS, SPLITS)
    a_begin, rows, strides, size = _words_of(entry)
    most = tl.maximum(tl.maximum(count_0, count_1), tl.maximum(count_2, count_3))
    while item < most * (NUM_PARTS * SPLITS):
        next_entry = _entry_of(
            item + num_programs, entries, first_part, max_groups, NUM_PARTS, SPLITS
        )
        next_a, next_rows, next_strides, next_size = _words_of(next_entry)
        split, local = item % SPLITS, item // SPLITS % NUM_PARTS
        group = item // (SPLITS * NUM_PARTS)
        if group < choose(local, count_0, count_1, count_2, count_3):
            total = _partial_intermediate(
                x, arena, entry, a_begin, rows, strides, size, split * SPLIT_INPUTS, num_inputs,
                x_stride, SPLIT_INPUTS, BLOCK_SHRINK, HAS_CUTS, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
            h_group = h + local.to(tl.int64) * max_groups * (2 * TILE_NUMBERS) + group * GROUP_ROWS
            stride = max_groups * GROUP_ROWS
            if SPLITS == 1:
                _store_intermediate(h_group, stride, total, entry, rows, size, INT8)
            else:
                number = local.to(tl.int64) * max_groups + group
                lines = partial + number * (SPLITS * TILE_NUMBERS)
                line = tl.arange(0, TILE_ROWS)[:, None] * GROUP_ROWS
                line += tl.arange(0, GROUP_ROWS)[None, :]
                tl.store(lines + split * TILE_NUMBERS + line, total)
                tl.debug_barrier()
                ticket = tickets + first_part.to(tl.int64) * max_groups + number
                if tl.atomic_add(ticket, 1, sem="acq_rel") == SPLITS - 1:
                    # The program that counts last adds all partial sums, always in the same order.
                    # It resets the ticket for the next launch.
                    tl.store(ticket, 0)
                    total = tl.load(lines + line)
                    for p in tl.static_range(1, SPLITS):
                        total += tl.load(lines + p * TILE_NUMBERS + line)
                    _store_intermediate(h_group, stride, total, entry, rows, size, INT8)
                    if TELLS:
                        tl.debug_barrier()
                        tl.atomic_add(done + first_part + local, 1, sem="release")
            if TELLS and SPLITS == 1:
                tl.debug_barrier()
                tl.atomic_add(done + first_part + local, 1, sem="release")
        item += num_programs
        entry, a_begin, rows, strides, size = next_entry, next_a, next_rows, next_strides, next_size


@triton.jit
def _entry_of(item, entries, first_part, max_groups, NUM_PARTS: tl.constexpr, SPLITS: tl.constexpr):
    """Where an item's group is listed; any listed or unused entry if there is no such item."""
    local, group = item // SPLITS % NUM_PARTS, item // (SPLITS * NUM_PARTS)
    group = tl.minimum(group, max_groups - 1)
    return entries + ((first_part + local).to(tl.int64) * max_groups + group) * WORDS


@triton.jit
def _words_of(entry):
    """The words of its entry that every item needs."""
    a_begin, rows = tl.load(entry + A_WORD), tl.load(entry + ROWS_WORD)
    return a_begin, rows, tl.load(entry + STRIDES_WORD), tl.load(entry + SIZE_WORD)


@triton.jit
def _partial_intermediate(
    x, arena, entry, a_begin, rows, strides, size, in_begin, num_inputs, x_stride,
    SPLIT_INPUTS: tl.constexpr, BLOCK_SHRINK: tl.constexpr, HAS_CUTS: tl.constexpr,
    WIDEN: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x A over one split of the inputs, `[TILE_ROWS, GROUP_ROWS]`; line t is row begin + t."""
    r, t = tl.arange(0, GROUP_ROWS), tl.arange(0, TILE_ROWS)
    is_rank, is_row = r < low_word(size), low_word(rows) + t < high_word(rows)
    a_rows = arena + aligned(a_begin, ALIGN) + r * aligned(low_word(strides), ALIGN)
    x_rows = x + (low_word(rows) + t).to(tl.int64) * x_stride
    in_end = tl.minimum(in_begin + SPLIT_INPUTS, num_inputs)
    first_input = 0
    if HAS_CUTS:
        cut = tl.load(entry + INPUTS_WORD)
        first_input = low_word(cut)
        in_begin, in_end = tl.maximum(in_begin, first_input), tl.minimum(in_end, high_word(cut))
    in_end = aligned(in_end, ALIGN)
    WIDTH: tl.constexpr = BLOCK_SHRINK // SHARES
    share = tl.arange(0, SHARES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    totals = tl.zeros((SHARES, TILE_ROWS, GROUP_ROWS), tl.float32)
    for at in tl.range(in_begin, in_end, BLOCK_SHRINK, num_stages=STAGES):
        k = at + share
        is_input = k < in_end
        a_mask = is_input[:, :, None] & is_rank[None, None, :]
        a_tile = a_rows[None, None, :] + (k - first_input)[:, :, None]
        a = tl.load(a_tile, mask=a_mask, other=0.0)
        x_mask = is_row[None, :, None] & is_input[:, None, :]
        x_tile = tl.load(x_rows[None, :, None] + k[:, None, :], mask=x_mask, other=0.0)
        totals = add_product(totals, x_tile, a, WIDEN)
    return tl.sum(totals, axis=0)


@triton.jit
def _store_intermediate(h, stride, total, entry, rows, size, INT8: tl.constexpr):
    """h of a group's row tile: values in the rows of the group, zeros elsewhere. In half precision
    it is a pair: see `as_pair`."""
    r, t = tl.arange(0, GROUP_ROWS), tl.arange(0, TILE_ROWS)
    if INT8:
        scales = tl.load(entry + SCALES_WORD).to(tl.pointer_type(tl.float32))
        total *= tl.load(scales + r, mask=r < low_word(size), other=0.0)[None, :]
    total *= high_word(size).to(tl.float32, bitcast=True)
    first = low_word(rows) % TILE_ROWS
    last = first + high_word(rows) - low_word(rows)
    # Values go to rows [first, last) of the tile, zeros to the others.
    here, outside = (t < last - first)[:, None], ((t < first) | (t >= last))[:, None]
    zeros = h + t.to(tl.int64)[:, None] * stride + r[None, :]
    values = h + (first + t).to(tl.int64)[:, None] * stride + r[None, :]
    zero = tl.zeros((TILE_ROWS, GROUP_ROWS), h.dtype.element_ty)
    high, low = as_pair(total, h.dtype.element_ty)
    tl.store(zeros, zero, mask=outside)
    tl.store(values, high, mask=here)
    if h.dtype.element_ty != tl.float32:
        plane = stride.to(tl.int64) * TILE_ROWS
        tl.store(zeros + plane, zero, mask=outside)
        tl.store(values + plane, low, mask=here)


@triton.jit
def part_of(column_tile, end_0, end_1, end_2, end_3, BLOCK_OUTPUTS: tl.constexpr):
    """The part of a site that a tile of its outputs belongs to: its number, the tile's number in
    it, and its outputs [begin, end). Parts that a site does not have are empty."""
    tiles_1 = tl.cdiv(end_0, BLOCK_OUTPUTS)
    tiles_2 = tiles_1 + tl.cdiv(end_1 - end_0, BLOCK_OUTPUTS)
    tiles_3 = tiles_2 + tl.cdiv(end_2 - end_1, BLOCK_OUTPUTS)
    local = (column_tile >= tiles_1).to(tl.int32) + (column_tile >= tiles_2)
    local += column_tile >= tiles_3
    column_tile -= choose(local, 0, tiles_1, tiles_2, tiles_3)
    begin = choose(local, 0, end_0, end_1, end_2)
    return local, column_tile, begin, choose(local, end_0, end_1, end_2, end_3)


@triton.jit
def _wait_until(counter, value):
    """Return when other programs have counted up to `value`; what they wrote before can be read."""
    found = tl.atomic_add(counter, 0, sem="acquire")
    while found < value:
        found = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _expand_tile(
    y, x, weight, arena, vector_arena, h, entries, lanes, counts, tile_ends, vectors, done, tile,
    first_part, max_groups, max_tiles, end_0, end_1, end_2, end_3, num_rows, num_inputs, x_stride,
    y_stride, num_row_tiles, max_vectors,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    IS_FUSED: tl.constexpr, HAS_CUTS: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and of the outputs of a part. IS_FUSED: y is W x first, others compute h."""
    row_tile, column_tile = tile % num_row_tiles, tile // num_row_tiles
    local, column_tile, begin, end = part_of(column_tile, end_0, end_1, end_2, end_3, BLOCK_OUTPUTS)
    begin, end = aligned(begin, ALIGN), aligned(end, ALIGN)
    part = first_part + local
    ends = tile_ends + part * max_tiles + row_tile
    last_group, first_group = tl.load(ends), tl.load(ends - 1, mask=row_tile > 0, other=0)
    num_vectors = tl.load(counts + part * 2 + 1)
    if IS_FUSED | (first_group < last_group) | (num_vectors > 0):
        row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = column_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_row, is_column = row < num_rows, column < end - begin
        y_tile = y + row.to(tl.int64)[:, None] * y_stride + (begin + column)[None, :]
        mask = is_row[:, None] & is_column[None, :]
        part_lanes = lanes + part.to(tl.int64) * max_groups * GROUP_ROWS
        listed = entries + part.to(tl.int64) * max_groups * WORDS
        h += local.to(tl.int64) * max_groups * (2 * TILE_NUMBERS)
        at, end_rank = first_group * GROUP_ROWS, last_group * GROUP_ROWS
        # Rows of B are loaded before waiting for the intermediate, later ones a block ahead.
        b_rows = _rows_of_b(part_lanes, at, end_rank, BLOCK_RANKS)
        next_rows = _rows_of_b(part_lanes, at + BLOCK_RANKS, end_rank, BLOCK_RANKS)
        if IS_FUSED:
            total = _base_product(
                x + row.to(tl.int64) * x_stride, is_row,
                weight + (begin + column).to(tl.int64) * num_inputs, is_column, num_inputs,
                BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES,
            )  # fmt: skip
        else:
            total = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
        b = _load_b(
            arena, b_rows, listed, at, end_rank, column, is_column, BLOCK_RANKS, HAS_CUTS, ALIGN,
        )  # fmt: skip
        if IS_FUSED:
            _wait_until(done + part, tl.load(counts + part * 2))
        high, low = _load_intermediate(h, max_groups, at, end_rank, BLOCK_RANKS)
        # Low numbers, apart: a row's order of sums must not depend on where groups lie in blocks.
        rest = tl.zeros((TILE_ROWS, BLOCK_OUTPUTS), tl.float32)
        while at < end_rank:
            later = at + BLOCK_RANKS
            next_b = _load_b(
                arena, next_rows, listed, later, end_rank, column, is_column, BLOCK_RANKS, HAS_CUTS,
                ALIGN,
            )  # fmt: skip
            next_high, next_low = _load_intermediate(h, max_groups, later, end_rank, BLOCK_RANKS)
            next_rows = _rows_of_b(part_lanes, later + BLOCK_RANKS, end_rank, BLOCK_RANKS)
            total = add_product(total, high, b, WIDEN)
            if h.dtype.element_ty != tl.float32:
                rest = add_product(rest, low, b, WIDEN)
            b, high, low, at = next_b, next_high, next_low, later
        vectors += part.to(tl.int64) * max_vectors * WORDS
        total = _with_vectors(total + rest, vector_arena, vectors, num_vectors, row, column)
        tl.store(y_tile, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _base_product(
    x_rows, is_row, weight_rows, is_column, num_inputs,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x W^T of a tile; `num_inputs` is a multiple of BLOCK_INPUTS."""
    total = tl.zeros((TILE_ROWS, BLOCK_OUTPUTS), tl.float32)
    k = tl.arange(0, BLOCK_INPUTS)
    for at in tl.range(0, num_inputs, BLOCK_INPUTS, num_stages=STAGES):
        x_tile = tl.load(x_rows[:, None] + (at + k)[None, :], mask=is_row[:, None], other=0.0)
        w_tile = tl.load(
            weight_rows[None, :] + (at + k)[:, None], mask=is_column[None, :], other=0.0
        )
        total = tl.dot(x_tile, w_tile, total)
    return total


@triton.jit
def _rows_of_b(lanes, at, end, BLOCK_RANKS: tl.constexpr):
    """The elements at which the rows of B begin, for the listed rank rows from `at` on."""
    k = at + tl.arange(0, BLOCK_RANKS)
    return tl.load(lanes + k, mask=k < end, other=NO_ROW)


@triton.jit
def _load_b(
    arena, b_rows, entries, at, end, column, is_column,
    BLOCK_RANKS: tl.constexpr, HAS_CUTS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rank rows of B at a tile's columns, `[BLOCK_RANKS, BLOCK_OUTPUTS]`."""
    mask = (b_rows > NO_ROW)[:, None] & is_column[None, :]
    if HAS_CUTS:
        k = at + tl.arange(0, BLOCK_RANKS)
        cut = tl.load(entries + k // GROUP_ROWS * WORDS + OUTPUTS_WORD, mask=k < end, other=0)
        mask = mask & (column[None, :] >= low_word(cut)[:, None])
        mask = mask & (column[None, :] < high_word(cut)[:, None])
    rows = arena + aligned(b_rows, ALIGN)
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _load_intermediate(h, max_groups, at, end, BLOCK_RANKS: tl.constexpr):
    """h of the listed rank rows `at` and following, `[TILE_ROWS, BLOCK_RANKS]`: see `as_pair`."""
    k, t = aligned(at, GROUP_ROWS) + tl.arange(0, BLOCK_RANKS), tl.arange(0, TILE_ROWS)
    pointers = h + t.to(tl.int64)[:, None] * (max_groups * GROUP_ROWS) + k[None, :]
    is_rank = (k < aligned(end, GROUP_ROWS))[None, :]
    high = tl.load(pointers, mask=is_rank, other=0.0)
    low = high
    if h.dtype.element_ty != tl.float32:
        plane = tl.cast(max_groups, tl.int64) * TILE_NUMBERS
        low = tl.load(pointers + plane, mask=is_rank, other=0.0)
    return high, low


@triton.jit
def _with_vectors(total, vector_arena, vectors, num_vectors, row, column):
    """Apply what listed adapters have of gain, bias of B and bias delta to their rows of a tile."""
    for v in range(num_vectors):
        total = _with_vector(total, vector_arena, vectors + v * WORDS, row, column)
    return total


@triton.jit
def _with_vector(total, vector_arena, vector, row, column):
    """`_with_vectors` for the vectors of one adapter, or for a part of them."""
    rows, cut = tl.load(vector + VECTOR_ROWS_WORD), tl.load(vector + COLUMNS_WORD)
    gain, bias = tl.load(vector + GAIN_WORD), tl.load(vector + BIAS_WORD)
    lora_bias = tl.load(vector + LORA_BIAS_WORD)
    coef = tl.load(vector + COEF_WORD).to(tl.int32).to(tl.float32, bitcast=True)
    is_row = (row >= low_word(rows)) & (row < high_word(rows))
    is_column = (column >= low_word(cut)) & (column < high_word(cut))
    changed = total
    if lora_bias > NO_ROW:
        values = tl.load(vector_arena + lora_bias + column, mask=is_column, other=0.0)
        changed += coef * values[None, :]
    if gain > NO_ROW:
        changed *= tl.load(vector_arena + gain + column, mask=is_column, other=1.0)[None, :]
    if bias > NO_ROW:
        changed += tl.load(vector_arena + bias + column, mask=is_column, other=0.0)[None, :]
    return tl.where(is_row[:, None] & is_column[None, :], changed, total)
