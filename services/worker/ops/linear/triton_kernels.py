"""Triton programs of products with quantised weights. The format of the codes: README.md."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _as_bfloat16(bits, WIDEN: tl.constexpr):
    """16 bits as the number that they are in bfloat16."""
    if WIDEN:
        values = (bits << 16).to(tl.float32, bitcast=True)
    else:
        values = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values


@triton.jit
def _decoded(
    units, KIND: tl.constexpr, LANE: tl.constexpr, WIDEN: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The numbers that the codes of one lane stand for, exactly, in bfloat16 or float32."""
    if PAIRS is not None:
        values = tl.inline_asm_elementwise(
            PAIRS[LANE], "=r,r", [units], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        units = units.to(tl.int32)
        if KIND == "fp8":
            if LANE == 0:
                bits = units & 0x87F0
            else:
                bits = ((units >> 4) & 0x0700) | ((units << 4) & 0x80F0)
            values = _as_bfloat16(bits, WIDEN)
            values = values * tl.full((1, 1), 2.0**120, values.dtype)
        elif KIND == "int8":
            units = units >> (8 * LANE)
            values = _as_bfloat16((units & 0x7F) | 0x4300, WIDEN)
            values -= _as_bfloat16((units & 0x80) | 0x4300, WIDEN)
        else:
            values = _as_bfloat16(((units >> (4 * LANE)) & 0xF) | 0x4300, WIDEN)
            values = values - tl.full((1, 1), 136.0, values.dtype)
    return values


@triton.jit(do_not_specialize=["num_rows", "num_splits", "split_blocks"])
def multiply_codes(
    y, x, codes, scales, zeros, partial, tickets, num_rows, num_outputs, num_inputs, x_stride,
    num_splits, split_blocks,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_EDGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, LANE_INPUTS: tl.constexpr,
    WIDEN: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = x W^T for a tile of outputs and rows, or partial sums of it.

    Grid: (tiles of outputs, splits of the inputs, tiles of rows).
    """
    LANES: tl.constexpr = 4 if KIND == "int4" else 2
    BLOCK_INPUTS: tl.constexpr = LANE_INPUTS * LANES
    output_tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = output_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    k = tl.arange(0, LANE_INPUTS)
    num_blocks = (num_inputs + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    code_rows = codes + output.to(tl.int64) * (num_blocks * LANE_INPUTS)
    x_rows = x + row.to(tl.int64) * x_stride
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    end = tl.minimum((split + 1) * split_blocks, num_blocks)
    for block in tl.range(split * split_blocks, end, num_stages=STAGES):
        tile = code_rows[:, None] + (block * LANE_INPUTS + k)[None, :]
        units = tl.load(tile, mask=is_output[:, None], other=0)
        for lane in tl.static_range(LANES):
            i = block * BLOCK_INPUTS + lane * LANE_INPUTS + k
            x_mask = is_row[None, :]
            if HAS_EDGE:
                x_mask = x_mask & (i < num_inputs)[:, None]
            x_tile = tl.load(x_rows[None, :] + i[:, None], mask=x_mask, other=0.0)
            if WIDEN:
                x_tile = x_tile.to(tl.float32)
            w = _decoded(units, KIND, lane, WIDEN, PAIRS).to(x_tile.dtype)
            at = output
            if GROUP > 0:
                at += (block * BLOCK_INPUTS + lane * LANE_INPUTS) // GROUP * num_outputs
            if HAS_ZEROS:
                w -= tl.load(zeros + at, mask=is_output, other=0.0).to(w.dtype)[:, None]
            if GROUP == 0:
                total = tl.dot(w, x_tile, total, input_precision="ieee")
            else:
                if (lane * LANE_INPUTS) % GROUP == 0 or lane == 0:
                    part = tl.dot(w, x_tile, input_precision="ieee")
                else:
                    part = tl.dot(w, x_tile, part, input_precision="ieee")
                if ((lane + 1) * LANE_INPUTS) % GROUP == 0 or lane == LANES - 1:
                    scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
                    total += part * scale[:, None]
    if GROUP == 0:
        total *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    mask = is_output[:, None] & is_row[None, :]
    line = row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    if num_splits > 1:
        ticket = tickets + row_tile * tl.num_programs(0) + output_tile
        part_size = num_rows.to(tl.int64) * num_outputs
        _store_part(y + line, partial + line, total, mask, ticket, part_size, split, num_splits)
    else:
        tl.store(y + line, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(y_tile, parts, total, mask, ticket, part_size, split, num_splits):
    """Store partial sums. The program that does so last adds all of them, always in the same order,
    and resets the ticket for the next launch."""
    tl.store(parts + split * part_size, total, mask=mask)
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel") == num_splits - 1:
        tl.store(ticket, 0)
        total = tl.load(parts, mask=mask, other=0.0)
        for part in range(1, num_splits):
            total += tl.load(parts + part * part_size, mask=mask, other=0.0)
        tl.store(y_tile, total.to(y_tile.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_outputs"])
def expand_codes(
    w, codes, scales, zeros, num_outputs, num_inputs, scale_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_EDGE: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, LANE_INPUTS: tl.constexpr, WIDEN: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of outputs, blocks of inputs)."""
    LANES: tl.constexpr = 4 if KIND == "int4" else 2
    BLOCK_INPUTS: tl.constexpr = LANE_INPUTS * LANES
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    block = tl.program_id(1)
    is_output = output < num_outputs
    k = tl.arange(0, LANE_INPUTS)
    code_rows = codes + output.to(tl.int64) * (tl.num_programs(1) * LANE_INPUTS)
    units = tl.load(
        code_rows[:, None] + (block * LANE_INPUTS + k)[None, :], mask=is_output[:, None], other=0
    )
    w_rows = w + output.to(tl.int64) * num_inputs
    for lane in tl.static_range(LANES):
        i = block * BLOCK_INPUTS + lane * LANE_INPUTS + k
        values = _decoded(units, KIND, lane, WIDEN, PAIRS).to(tl.float32)
        at = output
        if GROUP > 0:
            at += (block * BLOCK_INPUTS + lane * LANE_INPUTS) // GROUP * scale_stride
        if HAS_ZEROS:
            values -= tl.load(zeros + at, mask=is_output, other=0.0).to(tl.float32)[:, None]
        values *= tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)[:, None]
        mask = is_output[:, None]
        if HAS_EDGE:
            mask = mask & (i < num_inputs)[None, :]
        tl.store(w_rows[:, None] + i[None, :], values.to(w.dtype.element_ty), mask=mask)
