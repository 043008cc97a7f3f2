"""Triton programs of the low-rank update. Layouts and grids: README.md; launches: `triton.py`.

All three kernels read a step's runs `[MAX_RUNS, 4]` int32 (slot, first row, end row, float32 bits
of the coefficient), the tables of `DeviceTables`, and `ends [2, num_sites, MAX_RUNS]` int32: the
number of items of runs 0..i at a site, for shrink and for expand. Unused runs have no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(8)
RUN_WORDS = tl.constexpr(4)
RANKS = tl.constexpr(16)


@triton.jit(do_not_specialize=["first_site", "num_sites", "split_inputs"])
def count_work(
    runs,
    index,
    records,
    in_features,
    ends,
    first_site,
    num_sites,
    split_inputs,
    MAX_RUNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """ends[:, site, i] = items of runs 0..i. Grid: one program for each site."""
    site = first_site + tl.program_id(0)
    i = tl.arange(0, MAX_RUNS)
    slot = tl.load(runs + i * RUN_WORDS)
    num_rows = tl.load(runs + i * RUN_WORDS + 2) - tl.load(runs + i * RUN_WORDS + 1)
    used = num_rows > 0
    entry = tl.load(index + slot.to(tl.int64) * num_sites + site, mask=used, other=-1).to(tl.int64)
    used = used & (entry >= 0)
    head = records + tl.where(used, entry, 0) * WORDS
    num_bands = tl.load(head + 1, mask=used, other=0).to(tl.int32)
    first_strip = tl.load(head + 2, mask=used, other=0)
    num_strips = tl.load(head + 3, mask=used, other=0).to(tl.int32)
    num_row_blocks = tl.where(used, (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    num_planes = (tl.load(in_features + site) + split_inputs - 1) // split_inputs
    shrinks = num_row_blocks * num_bands * num_planes
    num_parts = tl.zeros((MAX_RUNS,), tl.int32)
    for s in range(tl.max(num_strips, axis=0)):
        width = tl.load(records + (first_strip + s) * WORDS + 1, mask=s < num_strips, other=0)
        num_parts += ((width + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS).to(tl.int32)
    place = ends + site * MAX_RUNS + i
    tl.store(place, tl.cumsum(shrinks, axis=0))
    tl.store(place + num_sites * MAX_RUNS, tl.cumsum(num_row_blocks * num_parts, axis=0))


@triton.jit
def _find_run(run_ends, item):
    """The run that an item belongs to, the item's number in it, and the run's number of items."""
    is_before = run_ends <= item
    run = tl.sum(is_before.to(tl.int32), axis=0)
    begin = tl.max(tl.where(is_before, run_ends, 0), axis=0)
    end = tl.min(tl.where(is_before, 2147483647, run_ends), axis=0)
    return run, item - begin, end - begin


@triton.jit
def _row_ids(runs, run, row_block, BLOCK_ROWS: tl.constexpr):
    begin = tl.load(runs + run * RUN_WORDS + 1)
    end = tl.load(runs + run * RUN_WORDS + 2)
    rows = begin + row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return rows.to(tl.int64), rows < end


@triton.jit
def _entry_of(runs, run, index, records, site, num_sites):
    slot = tl.load(runs + run * RUN_WORDS).to(tl.int64)
    return records + tl.load(index + slot * num_sites + site).to(tl.int64) * WORDS


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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    USES_DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """planes[p, t, r] = sum of A[r, i] * x[t, i] over the inputs i of split p.

    Grid: a fixed number of programs, each taking every so-many-th item (run, row block, band,
    split) up to a count read from the device.
    """
    run_ends = tl.load(ends + site * MAX_RUNS + tl.arange(0, MAX_RUNS))
    num_planes = (num_inputs + SPLIT_INPUTS - 1) // SPLIT_INPUTS
    for item in range(tl.program_id(0), tl.max(run_ends, axis=0), tl.num_programs(0)):
        run, local, _ = _find_run(run_ends, item)
        entry = _entry_of(runs, run, index, records, site, num_sites)
        num_bands = tl.load(entry + 1).to(tl.int32)
        plane = local % num_planes
        local = local // num_planes
        band = records + (tl.load(entry) + local % num_bands) * WORDS
        rows, is_row = _row_ids(runs, run, local // num_bands, BLOCK_ROWS)
        in_begin = plane * SPLIT_INPUTS
        in_end = tl.minimum(in_begin + SPLIT_INPUTS, num_inputs)
        total = _shrink_band(
            x + rows * x_stride, is_row, arena, records, band, in_begin, in_end,
            BLOCK_ROWS, BLOCK_INPUTS, USES_DOT, WIDEN, ALIGN, STAGES,
        )  # fmt: skip
        r = tl.arange(0, RANKS)
        is_rank = r < tl.load(band + 1)
        place = planes + plane.to(tl.int64) * plane_stride + rows[:, None] * rank_stride
        tl.store(place + tl.load(band) + r[None, :], total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _shrink_band(
    x_rows,
    is_row,
    arena,
    records,
    band,
    in_begin,
    in_end,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    USES_DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x A^T over inputs [in_begin, in_end), float32 `[BLOCK_ROWS, RANKS]`."""
    r = tl.arange(0, RANKS)
    is_rank = r < tl.load(band + 1)
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
        a_rows = tile.to(tl.pointer_type(x_rows.dtype.element_ty)) + (
            r[:, None] * tl.multiple_of(tl.load(piece + 3), ALIGN)
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
            if USES_DOT:
                total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            else:
                total += x.to(tl.float32)[:, None, :] * a.to(tl.float32)[None, :, :]
    if not USES_DOT:
        total = tl.sum(total, axis=2)
    return total


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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    PLANES: tl.constexpr,
    USES_DOT: tl.constexpr,
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
        run, local, num_items = _find_run(run_ends, item)
        entry = _entry_of(runs, run, index, records, site, num_sites)
        num_rows = tl.load(runs + run * RUN_WORDS + 2) - tl.load(runs + run * RUN_WORDS + 1)
        num_parts = num_items // ((num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
        rows, is_row = _row_ids(runs, run, local // num_parts, BLOCK_ROWS)
        coef = tl.load(runs + run * RUN_WORDS + 3).to(tl.float32, bitcast=True)
        strip = records + tl.load(entry + 2) * WORDS
        part = local % num_parts
        num_blocks = (tl.load(strip + 1).to(tl.int32) + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
        while part >= num_blocks:
            part -= num_blocks
            strip += WORDS
            num_blocks = (tl.load(strip + 1).to(tl.int32) + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
        column = part * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_column = column < tl.multiple_of(tl.load(strip + 1).to(tl.int32), ALIGN)
        h_rows = planes + rows * rank_stride
        total = _expand_strip(
            h_rows, is_row, plane_stride, arena, records, strip, column, is_column,
            coef, y.dtype.element_ty, BLOCK_ROWS, BLOCK_OUTPUTS, PLANES, USES_DOT, WIDEN, ALIGN,
            STAGES,
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
    WIDEN: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """coef * scale * h B over a strip's columns, float32 `[BLOCK_ROWS, BLOCK_OUTPUTS]`."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    r = tl.arange(0, RANKS)
    factor = coef * tl.load(strip + 4).to(tl.int32).to(tl.float32, bitcast=True)
    first_tile = tl.load(strip + 2)
    for t in tl.range(0, tl.load(strip + 3).to(tl.int32), num_stages=STAGES):
        tile = records + (first_tile + t) * WORDS
        is_rank = r < tl.load(tile + 2)
        b_rows = (arena + tl.multiple_of(tl.load(tile), ALIGN)).to(tl.pointer_type(dtype))
        b = tl.load(
            b_rows + r[:, None] * tl.multiple_of(tl.load(tile + 3), ALIGN) + column[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        h_mask = is_row[:, None] & is_rank[None, :]
        h_place = h_rows[:, None] + tl.load(tile + 1) + r[None, :]
        h = tl.load(h_place, mask=h_mask, other=0.0)
        # Unrolled, so that the loads are under way together; added in order.
        for p in tl.static_range(1, PLANES):
            h += tl.load(h_place + p * plane_stride, mask=h_mask, other=0.0)
        h *= factor
        if WIDEN:
            b = b.to(tl.float32)
        if USES_DOT:
            total = _dot_in_two_parts(h, b, total)
        else:
            total += tl.sum(h[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    return total


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
