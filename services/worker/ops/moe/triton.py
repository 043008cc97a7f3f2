"""The products of a mixture of experts on GPUs, without reading the chosen experts on the host.

`pairs.py` orders pairs of token and expert by expert. `grouped_linear` multiplies each expert's
pairs by its weight: a fixed number of programs share the tiles (expert, block of pairs, block of
outputs), whose number they read from the device. `combine` adds up the results of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.ops.launch import must_widen, num_programs, power_of_two
from loraplex_services.worker.ops.moe.pairs import SortedPairs

BLOCK_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """Sizes of the tiles of one grouped product."""

    block_rows: int
    """Pairs."""
    block_outputs: int
    block_inputs: int
    """Inputs read at a time."""
    num_warps: int
    num_stages: int
    programs_per_processor: int


TILINGS_HALF = (
    GroupedTiling(16, 64, 128, 4, 4, 2),
    GroupedTiling(64, 128, 64, 4, 3, 2),
    GroupedTiling(128, 128, 32, 8, 4, 2),
)
"""For bfloat16 and float16, with few, some and many pairs per expert. With few pairs, most of the
time goes into reading weights. The first was the fastest for plain products of 1 to 16 rows on an
H200; the others were not measured."""
TILINGS_FLOAT32 = (GroupedTiling(16, 32, 64, 4, 3, 2), GroupedTiling(32, 64, 32, 4, 3, 2))
FEW_PAIRS, SOME_PAIRS = 16, 96
"""The mean numbers of pairs per expert up to which the first and the second tiling are used."""


def tilings(dtype: torch.dtype) -> tuple[GroupedTiling, ...]:
    """All that products of a dtype use."""
    return TILINGS_FLOAT32 if dtype is torch.float32 else TILINGS_HALF


def tiling_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> GroupedTiling:
    """The tiling by the mean number of pairs per expert; only the device knows the actual
    numbers."""
    choices, mean = tilings(dtype), num_pairs / num_experts
    number = (mean > FEW_PAIRS) + (mean > SOME_PAIRS)
    return choices[min(number, len(choices) - 1)]


@triton.jit(do_not_specialize=["num_experts"])
def grouped_linear_kernel(
    y,
    x,
    weights,
    order,
    ends,
    num_experts,
    num_outputs,
    num_inputs,
    MAX_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: a fixed number of programs that share the tiles. Tiles of one expert and block
    of outputs are neighbours, so that they share reads of the weight.

    NUM_ACTIVE > 0: x has a row for each token, and y one for each pair in the order of `order`.
    NUM_ACTIVE = 0: x has a row for each pair in that order, and y one for each pair by its number.
    """
    experts = tl.arange(0, MAX_EXPERTS)
    is_expert = experts < num_experts
    pair_ends = tl.load(ends + experts, mask=is_expert, other=0)
    pair_begins = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    row_blocks = tl.where(is_expert, (pair_ends - pair_begins + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    num_output_blocks = (num_outputs + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    tile_ends = tl.cumsum(row_blocks, axis=0) * num_output_blocks
    for tile in range(tl.program_id(0), tl.max(tile_ends, axis=0), tl.num_programs(0)):
        is_before = tile_ends <= tile
        expert = tl.sum(is_before.to(tl.int32), axis=0)
        local = tile - tl.max(tl.where(is_before, tile_ends, 0), axis=0)
        is_own = experts == expert
        num_row_blocks = tl.sum(tl.where(is_own, row_blocks, 0), axis=0)
        first = tl.sum(tl.where(is_own, pair_begins, 0), axis=0)
        end = tl.sum(tl.where(is_own, pair_ends, 0), axis=0)
        positions = first + (local % num_row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        columns = (local // num_row_blocks) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        weight = weights + expert.to(tl.int64) * num_outputs * num_inputs
        _multiply_tile(
            y, x, weight, order, positions, positions < end, columns, num_outputs, num_inputs,
            NUM_ACTIVE, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, WIDEN, STAGES,
        )  # fmt: skip


@triton.jit
def _multiply_tile(
    y, x, weight, order, positions, is_row, columns, num_outputs, num_inputs,
    NUM_ACTIVE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store x W^T for the pairs at `positions` of the order and some columns."""
    pairs = tl.load(order + positions, mask=is_row, other=0)
    if NUM_ACTIVE > 0:
        x_rows, y_rows = pairs // NUM_ACTIVE, positions.to(tl.int64)
    else:
        x_rows, y_rows = positions.to(tl.int64), pairs
    is_column = columns < num_outputs
    x_rows = x + x_rows * num_inputs
    w_rows = weight + columns.to(tl.int64) * num_inputs
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for begin in tl.range(0, num_inputs, BLOCK_INPUTS, num_stages=STAGES):
        i = begin + tl.arange(0, BLOCK_INPUTS)
        is_input = i < num_inputs
        a = tl.load(
            x_rows[:, None] + i[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        w = tl.load(
            w_rows[:, None] + i[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0
        )
        if WIDEN:
            a, w = a.to(tl.float32), w.to(tl.float32)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    tl.store(
        y + y_rows[:, None] * num_outputs + columns[None, :],
        total.to(y.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


def grouped_linear(
    x: Tensor, weights: Tensor, pairs: SortedPairs, tiling: GroupedTiling, of_tokens: bool
) -> Tensor:
    """Semantics: y[p] = W[expert of p] x[p] for each pair p.

    Args:
        x: `[T, in]` where `of_tokens`, else `[T * k, in]` in the order of `pairs`; contiguous.
        weights: `[experts, out, in]`, contiguous, of x's dtype.

    Returns:
        `[T * k, out]`: in the order of `pairs` where `of_tokens`, else by pair number.
    """
    num_experts, num_outputs, num_inputs = weights.shape
    assert x.is_contiguous() and weights.is_contiguous(), (x.stride(), weights.stride())
    assert x.shape[1] == num_inputs and x.dtype is weights.dtype, (x.shape, weights.shape)
    num_pairs = len(pairs.order)
    y = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    grouped_linear_kernel[(num_programs(x.device, tiling.programs_per_processor),)](
        y,
        x,
        weights,
        pairs.order,
        pairs.ends,
        num_experts,
        num_outputs,
        num_inputs,
        **constants_of(tiling, num_experts, pairs.num_active if of_tokens else 0, x.dtype),
        num_warps=tiling.num_warps,
    )
    return y


def constants_of(
    tiling: GroupedTiling, num_experts: int, num_active: int, dtype: torch.dtype
) -> dict[str, int | bool]:
    """The compile-time constants of `grouped_linear_kernel`."""
    return {
        "MAX_EXPERTS": power_of_two(num_experts),
        "NUM_ACTIVE": num_active,
        "BLOCK_ROWS": tiling.block_rows,
        "BLOCK_OUTPUTS": tiling.block_outputs,
        "BLOCK_INPUTS": tiling.block_inputs,
        "WIDEN": must_widen(dtype),
        "STAGES": tiling.num_stages,
    }


@triton.jit
def combine_kernel(
    out, y, weights, WIDTH: tl.constexpr, NUM_ACTIVE: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Grid: (token, block of columns)."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = column < WIDTH
    total = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for rank in tl.static_range(NUM_ACTIVE):
        pair = token * NUM_ACTIVE + rank
        values = tl.load(y + pair * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * values
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """Semantics: out[t] = sum over r of weights[t, r] * y[t * k + r], summed in float32.

    Args:
        y: `[T * k, H]`, contiguous.
        weights: float32 `[T, k]`, contiguous.

    Returns:
        `[T, H]`.
    """
    num_tokens, num_active = weights.shape
    assert y.is_contiguous() and weights.is_contiguous(), (y.stride(), weights.stride())
    width = y.shape[1]
    out = torch.empty(num_tokens, width, dtype=y.dtype, device=y.device)
    combine_kernel[num_tokens, triton.cdiv(width, BLOCK_COLUMNS)](
        out, y, weights, WIDTH=width, NUM_ACTIVE=num_active, BLOCK_COLUMNS=BLOCK_COLUMNS
    )
    return out
