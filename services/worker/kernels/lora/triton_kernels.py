"""Triton programs of the low-rank update. Layouts and grids: README.md; launches: `triton.py`.

Both read a step's runs, the tables of `DeviceTables`, and the counts that `triton_work` makes. A
run with at most SHORT_MAX rows is computed with the SHORT constants, others with the LONG ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.kernels.lora.triton_work import (
    RUN_WORDS,
    WORDS,
    entry_of,
    find_part,
    find_run,
    num_rows_of,
    row_ids,
)

TILE_RANKS = tl.constexpr(16)


@triton.jit(do_not_specialize=["site", "num_sites"])
def shrink(
    x,
    planes,
    arena,
    runs,
    index,
    records,
    ends,
    site,
    num_sites,
    num_inputs,
    x_stride,
    plane_stride,
    rank_stride,
    MAX_RUNS: tl.constexpr,
    SHORT_MAX: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    SHORT_RANKS: tl.constexpr,
    SHORT_INPUTS: tl.constexpr,
    SHORT_SPLIT: tl.constexpr,
    SHORT_DOT: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    LONG_RANKS: tl.constexpr,
    LONG_INPUTS: tl.constexpr,
    LONG_SPLIT: tl.constexpr,
    INT8: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """planes[p, t, r] = sum of A[r, i] * x[t, i] over the inputs i of split p.

    Grid: a fixed number of programs, each taking every so-many-th item (run, row block, part of a
    band, split) up to a count read from the device. Each run has the family its length asks for.
    """
    run_ends = tl.load(ends + site * MAX_RUNS + tl.arange(0, MAX_RUNS))
    for item in range(tl.program_id(0), tl.max(run_ends, axis=0), tl.num_programs(0)):
        run, local, num_items = find_run(run_ends, item)
        entry = entry_of(runs, run, index, records, site, num_sites)
        num_rows = num_rows_of(runs, run)
        if num_rows <= SHORT_MAX:
            _shrink_item(
                x, planes, arena, runs, run, num_rows, local, num_items, records, entry,
                num_inputs, x_stride, plane_stride, rank_stride, SHORT_ROWS, SHORT_RANKS,
                SHORT_INPUTS, SHORT_SPLIT, SHORT_DOT, INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
        else:
            _shrink_item(
                x, planes, arena, runs, run, num_rows, local, num_items, records, entry,
                num_inputs, x_stride, plane_stride, rank_stride, LONG_ROWS, LONG_RANKS,
                LONG_INPUTS, LONG_SPLIT, True, INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip


@triton.jit
def _shrink_item(
    x, planes, arena, runs, run, num_rows, local, num_items, records, entry,
    num_inputs, x_stride, plane_stride, rank_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr, USES_DOT: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One item, in the bucket of ranks that its band needs: 16, 32 or 64 at a time."""
    num_planes = (num_inputs + SPLIT_INPUTS - 1) // SPLIT_INPUTS
    num_row_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    num_parts = num_items // (num_row_blocks * num_planes)
    plane = local % num_planes
    local = local // num_planes
    part, band = find_part(local % num_parts, records + tl.load(entry) * WORDS, BLOCK_RANKS)
    rows, is_row = row_ids(runs, run, local // num_parts, BLOCK_ROWS)
    first_rank = part * BLOCK_RANKS
    num_ranks = tl.minimum(tl.load(band + 1).to(tl.int32) - first_rank, BLOCK_RANKS)
    x_rows = x + rows * x_stride
    place = planes + plane.to(tl.int64) * plane_stride + rows * rank_stride
    place += tl.load(band) + first_rank
    in_begin = plane * SPLIT_INPUTS
    in_end = tl.minimum(in_begin + SPLIT_INPUTS, num_inputs)
    if BLOCK_RANKS == 16:
        _shrink_band(
            x_rows, is_row, place, arena, records, band, first_rank, num_ranks, in_begin, in_end,
            BLOCK_ROWS, 16, BLOCK_INPUTS, USES_DOT, INT8, WIDEN, ALIGN, STAGES,
        )  # fmt: skip
    else:
        if num_ranks <= 16:
            _shrink_band(
                x_rows, is_row, place, arena, records, band, first_rank, num_ranks, in_begin,
                in_end, BLOCK_ROWS, 16, BLOCK_INPUTS, USES_DOT, INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
        elif num_ranks <= 32:
            _shrink_band(
                x_rows, is_row, place, arena, records, band, first_rank, num_ranks, in_begin,
                in_end, BLOCK_ROWS, 32, BLOCK_INPUTS, USES_DOT, INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
        else:
            _shrink_band(
                x_rows, is_row, place, arena, records, band, first_rank, num_ranks, in_begin,
                in_end, BLOCK_ROWS, BLOCK_RANKS, BLOCK_INPUTS, USES_DOT, INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip


@triton.jit
def _shrink_band(
    x_rows, is_row, place, arena, records, band, first_rank, num_ranks, in_begin, in_end,
    BLOCK_ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    USES_DOT: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store x A^T over inputs [in_begin, in_end), float32 `[BLOCK_ROWS, RANKS]`, at `place`."""
    r = tl.arange(0, RANKS)
    is_rank = r < num_ranks
    if USES_DOT:
        total = tl.zeros((BLOCK_ROWS, RANKS), tl.float32)
    else:
        total = tl.zeros((BLOCK_ROWS, RANKS, BLOCK_INPUTS), tl.float32)
    first_piece = tl.load(band + 2)
    for p in range(tl.load(band + 3).to(tl.int32)):
        piece = records + (first_piece + p) * WORDS
        col_begin = tl.multiple_of(tl.load(piece + 1).to(tl.int32), ALIGN)
        begin = tl.multiple_of(tl.maximum(in_begin, col_begin), ALIGN)
        end = tl.minimum(in_end, col_begin + tl.load(piece + 2).to(tl.int32))
        end = tl.multiple_of(end, ALIGN)
        tile = arena + tl.multiple_of(tl.load(piece), ALIGN)
        a_rows = tile.to(tl.pointer_type(tl.int8 if INT8 else x_rows.dtype.element_ty)) + (
            (first_rank + r)[:, None] * tl.multiple_of(tl.load(piece + 3), ALIGN)
        )
        for at in tl.range(begin, end, BLOCK_INPUTS, num_stages=STAGES):
            column = at + tl.arange(0, BLOCK_INPUTS)
            is_column = column < end
            a = tl.load(
                a_rows + (column - col_begin)[None, :],
                mask=is_rank[:, None] & is_column[None, :],
                other=0.0,
            )
            x = tl.load(
                x_rows[:, None] + column[None, :],
                mask=is_row[:, None] & is_column[None, :],
                other=0.0,
            )
            if WIDEN:
                a, x = a.to(tl.float32), x.to(tl.float32)
            elif INT8:
                a = a.to(x_rows.dtype.element_ty)
            if USES_DOT:
                total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            else:
                total += x.to(tl.float32)[:, None, :] * a.to(tl.float32)[None, :, :]
    if not USES_DOT:
        total = tl.sum(total, axis=2)
    if INT8:
        scales = tl.load(band + 4).to(tl.pointer_type(tl.float32)) + first_rank
        total *= tl.load(scales + r, mask=is_rank, other=0.0)[None, :]
    tl.store(place[:, None] + r[None, :], total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["site", "num_sites"])
def expand(
    y,
    planes,
    arena,
    runs,
    index,
    records,
    ends,
    site,
    num_sites,
    y_stride,
    plane_stride,
    rank_stride,
    MAX_RUNS: tl.constexpr,
    SHORT_MAX: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    SHORT_OUTPUTS: tl.constexpr,
    SHORT_PLANES: tl.constexpr,
    SHORT_DOT: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    LONG_OUTPUTS: tl.constexpr,
    LONG_PLANES: tl.constexpr,
    INT8: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[t, o] = gain[o] * (y[t, o] + coef * (scale * sum_r h[t, r] B[r, o] + lora_bias[o]))
    + bias_delta[o], where h = planes summed in order; in place.

    Grid: as `shrink`, over items (run, row block, part of a strip).
    """
    run_ends = tl.load(ends + (num_sites + site) * MAX_RUNS + tl.arange(0, MAX_RUNS))
    for item in range(tl.program_id(0), tl.max(run_ends, axis=0), tl.num_programs(0)):
        run, local, num_items = find_run(run_ends, item)
        entry = entry_of(runs, run, index, records, site, num_sites)
        num_rows = num_rows_of(runs, run)
        if num_rows <= SHORT_MAX:
            _expand_item(
                y, planes, arena, runs, run, num_rows, local, num_items, records, entry, y_stride,
                plane_stride, rank_stride, SHORT_ROWS, SHORT_OUTPUTS, SHORT_PLANES, SHORT_DOT,
                INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip
        else:
            _expand_item(
                y, planes, arena, runs, run, num_rows, local, num_items, records, entry, y_stride,
                plane_stride, rank_stride, LONG_ROWS, LONG_OUTPUTS, LONG_PLANES, True,
                INT8, WIDEN, ALIGN, STAGES,
            )  # fmt: skip


@triton.jit
def _expand_item(
    y, planes, arena, runs, run, num_rows, local, num_items, records, entry, y_stride,
    plane_stride, rank_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, PLANES: tl.constexpr,
    USES_DOT: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    num_parts = num_items // ((num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
    first_strip = records + tl.load(entry + 2) * WORDS
    part, strip = find_part(local % num_parts, first_strip, BLOCK_OUTPUTS)
    rows, is_row = row_ids(runs, run, local // num_parts, BLOCK_ROWS)
    coef = tl.load(runs + run * RUN_WORDS + 3).to(tl.float32, bitcast=True)
    column = part * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_column = column < tl.multiple_of(tl.load(strip + 1).to(tl.int32), ALIGN)
    total = _expand_strip(
        planes + rows * rank_stride, is_row, plane_stride, arena, records, strip, column,
        is_column, coef, y.dtype.element_ty, BLOCK_ROWS, BLOCK_OUTPUTS, PLANES, USES_DOT, INT8,
        WIDEN, ALIGN, STAGES,
    )  # fmt: skip
    mask = is_row[:, None] & is_column[None, :]
    place = y + rows[:, None] * y_stride
    place += tl.multiple_of(tl.load(strip), ALIGN) + column[None, :]
    total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    total = _with_vectors(total, arena, strip, column, is_column, coef)
    tl.store(place, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _expand_strip(
    h_rows,
    is_row,
    plane_stride,
    arena,
    records,
    strip,
    column,
    is_column,
    coef,
    dtype: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PLANES: tl.constexpr,
    USES_DOT: tl.constexpr,
    INT8: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """coef * scale * h B over a strip's columns, float32 `[BLOCK_ROWS, BLOCK_OUTPUTS]`."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    r = tl.arange(0, TILE_RANKS)
    factor = coef * tl.load(strip + 4).to(tl.int32).to(tl.float32, bitcast=True)
    first_tile = tl.load(strip + 2)
    for t in tl.range(0, tl.load(strip + 3).to(tl.int32), num_stages=STAGES):
        tile = records + (first_tile + t) * WORDS
        is_rank = r < tl.load(tile + 2)
        b_rows = arena + tl.multiple_of(tl.load(tile), ALIGN)
        b_rows = b_rows.to(tl.pointer_type(tl.int8 if INT8 else dtype))
        b = tl.load(
            b_rows + r[:, None] * tl.multiple_of(tl.load(tile + 3), ALIGN) + column[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        h_mask = is_row[:, None] & is_rank[None, :]
        h_place = h_rows[:, None] + tl.load(tile + 1) + r[None, :]
        h = _sum_planes(h_place, h_mask, plane_stride, PLANES)
        h *= factor
        if WIDEN:
            b = b.to(tl.float32)
        elif INT8:
            b = b.to(dtype)
        if USES_DOT:
            total = _dot_in_two_parts(h, b, total)
        else:
            total += tl.sum(h[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    return total


@triton.jit
def _sum_planes(h_place, mask, plane_stride, PLANES: tl.constexpr):
    """Partial sums added in order, four loads under way together."""
    h = tl.load(h_place, mask=mask, other=0.0)
    for first in range(1, PLANES, 4):
        for k in tl.static_range(4):
            plane = first + k
            h += tl.load(h_place + plane * plane_stride, mask=mask & (plane < PLANES), other=0.0)
    return h


@triton.jit
def _dot_in_two_parts(h, b, total):
    """total + h b with h float32: a half-precision b takes h as the sum of two of its numbers, so
    that the intermediate is not rounded to half precision."""
    high = h.to(b.dtype)
    total = tl.dot(high, b, total, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (h - high.to(tl.float32)).to(b.dtype)
        total = tl.dot(low, b, total, input_precision="ieee")
    return total


@triton.jit
def _with_vectors(total, arena, strip, column, is_column, coef):
    """Apply what a strip has of gain, bias of B and bias delta to `[BLOCK_ROWS, BLOCK_OUTPUTS]`."""
    gain, lora_bias, bias = tl.load(strip + 5), tl.load(strip + 6), tl.load(strip + 7)
    if lora_bias >= 0:
        values = (arena + lora_bias).to(tl.pointer_type(tl.float32))
        total += coef * tl.load(values + column, mask=is_column, other=0.0)[None, :]
    if gain >= 0:
        values = (arena + gain).to(tl.pointer_type(tl.float32))
        total *= tl.load(values + column, mask=is_column, other=1.0)[None, :]
    if bias >= 0:
        values = (arena + bias).to(tl.pointer_type(tl.float32))
        total += tl.load(values + column, mask=is_column, other=0.0)[None, :]
    return total
