"""Seeded sampling on GPUs, without synchronizing with the host.

The noise is that of `sampling/philox.py`, bit for bit: integers until the last step, see there and
`sampling/fixed_log.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.sampling import fixed_log as fl
from loraplex_services.worker.sampling import philox

BLOCK_TOKENS = 1024
BLOCK_ROWS = 128
JOINED_BLOCKS = 128
"""Blocks of a row that are compared at a time."""
NOISE_MAX = tl.constexpr(philox.GUMBEL_MAX + 0.1)
"""More than any noise."""
SLACK = tl.constexpr(0.01)
"""Margin for the rounding of a device's logarithm."""
WORD = tl.constexpr(philox.WORD)
WORD_UNIT = tl.constexpr(2.0**-32)

MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_0), tl.constexpr(philox.MULTIPLIER_1)
WEYL_0, WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)
NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)
NOISE_SHIFT = tl.constexpr(fl.FRACTION_BITS - philox.NOISE_BITS)
NOISE_UNIT = tl.constexpr(2.0**-philox.NOISE_BITS)
FRACTION_BITS, MANTISSA_BITS = tl.constexpr(fl.FRACTION_BITS), tl.constexpr(fl.MANTISSA_BITS)
SERIES_BITS, LN2 = tl.constexpr(fl.SERIES_BITS), tl.constexpr(fl.LN2)
HALF, THIRD = tl.constexpr(fl.HALF), tl.constexpr(fl.THIRD)
QUARTER, FIFTH = tl.constexpr(fl.QUARTER), tl.constexpr(fl.FIFTH)
NUM_INTERVALS = tl.constexpr(1 << fl.INDEX_BITS)
MANTISSA_SHIFT = tl.constexpr(fl.MANTISSA_BITS - fl.INDEX_BITS)
REDUCED_ONE = tl.constexpr(1 << fl.REDUCED_BITS)
REDUCED_SHIFT = tl.constexpr(fl.REDUCED_BITS - fl.FRACTION_BITS)
LN2_33, LN2_38 = tl.constexpr(33 * fl.LN2), tl.constexpr(fl.FRACTION_BITS * fl.LN2)
EXPONENT_SHIFT, EXPONENT_BIAS = tl.constexpr(52), tl.constexpr(1023)
"""Bits of a float64."""


@triton.jit
def ln_fixed(value, inverses, logs):
    """`fixed_log.ln_fixed` of int64 values; the exponent is read from an exact float64."""
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = (bits >> EXPONENT_SHIFT) - EXPONENT_BIAS
    mantissa = value << (MANTISSA_BITS - exponent)
    interval = (mantissa >> MANTISSA_SHIFT) - NUM_INTERVALS
    reduced = mantissa * tl.load(inverses + interval) - REDUCED_ONE
    r = reduced >> REDUCED_SHIFT
    square = (r * r) >> FRACTION_BITS
    series = QUARTER - ((r * FIFTH) >> FRACTION_BITS)
    series = THIRD - ((r * series) >> FRACTION_BITS)
    series = HALF - ((r * series) >> FRACTION_BITS)
    return exponent * LN2 + tl.load(logs + interval) + r - ((square * series) >> SERIES_BITS)


@triton.jit
def philox_words(seed, token, position, sample):
    """First words of Philox4x32-10 as uint32 `[n]`, by 32-bit products and their high halves."""
    c0 = token.to(tl.uint32)
    zero = c0 - c0
    c1, c2, c3 = zero + position.to(tl.uint32), zero + sample.to(tl.uint32), zero
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first, second = zero + MULTIPLIER_0, zero + MULTIPLIER_1
    for _ in tl.static_range(NUM_ROUNDS):
        high0, low0 = tl.umulhi(c0, first), c0 * first
        high1, low1 = tl.umulhi(c2, second), c2 * second
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0


@triton.jit
def gumbel(words, inverses, logs):
    """`philox.gumbel`, from the uint32 words that `philox_words` makes."""
    word = words.to(tl.int64)
    exponential = LN2_33 - ln_fixed(2 * word + 1, inverses, logs)
    noise = LN2_38 - ln_fixed(exponential, inverses, logs)
    return (noise >> NOISE_SHIFT).to(tl.float32) * NOISE_UNIT


@triton.jit
def most_gumbel(words):
    """No less than the noise of uint32 words, but for `SLACK`: -ln(-ln(1 - v)) <= -ln(v)."""
    return -tl.log(((words ^ WORD).to(tl.float32) + 0.5) * WORD_UNIT)


@triton.jit(do_not_specialize=["first_id", "num_rows"])
def floor_kernel(
    floors,
    best_scores,
    best_tokens,
    first_id,
    keys,
    inverses,
    logs,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
):
    """floors[n] = score + noise of row n's best-scored token, less `SLACK`. Grid: blocks of
    rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < num_rows
    seed = tl.load(keys + 3 * row, mask=inside, other=0)
    position = tl.load(keys + 3 * row + 1, mask=inside, other=0)
    sample = tl.load(keys + 3 * row + 2, mask=inside, other=0)
    token = tl.load(best_tokens + row, mask=inside, other=0) + first_id
    noise = gumbel(philox_words(seed, token, position, sample), inverses, logs)
    best = tl.load(best_scores + row, mask=inside, other=0.0)
    tl.store(floors + row, best + noise - SLACK, mask=inside)


@triton.jit(do_not_specialize=["first_id", "num_blocks"])
def draw_kernel(
    best_scores,
    best_tokens,
    scores,
    floors,
    first_id,
    keys,
    inverses,
    logs,
    num_tokens,
    num_blocks,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid: (row, block of tokens). The best of each block, the lowest token among equals. The
    exact noise is computed in blocks only where some token may reach the row's floor."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    score = tl.load(scores + row * num_tokens + token, mask=inside, other=float("-inf"))
    best, winner = float("-inf"), block * BLOCK_TOKENS
    floor = tl.load(floors + row)
    if tl.max(score, axis=0) + NOISE_MAX >= floor:
        seed, position = tl.load(keys + 3 * row), tl.load(keys + 3 * row + 1)
        words = philox_words(seed, token + first_id, position, tl.load(keys + 3 * row + 2))
        if tl.max(score + most_gumbel(words), axis=0) >= floor:
            score += gumbel(words, inverses, logs)
            best = tl.max(score, axis=0)
            winner = tl.min(tl.where(score == best, token, num_tokens - 1), axis=0)
    tl.store(best_scores + row * num_blocks + block, best)
    tl.store(best_tokens + row * num_blocks + block, winner)


@triton.jit(do_not_specialize=["num_blocks"])
def best_kernel(
    best_scores, best_tokens, scores, num_tokens, num_blocks, BLOCK_TOKENS: tl.constexpr
):  # fmt: skip
    """Grid: (row, block of tokens). The best of each block, the lowest token among equals."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    score = tl.load(scores + row * num_tokens + token, mask=token < num_tokens, other=float("-inf"))
    best = tl.max(score, axis=0)
    # A row without numbers has no best token, but still one of its own.
    winner = tl.min(tl.where(score == best, token, num_tokens - 1), axis=0)
    tl.store(best_scores + row * num_blocks + block, best)
    tl.store(best_tokens + row * num_blocks + block, winner)


@triton.jit(do_not_specialize=["num_blocks"])
def join_kernel(
    row_scores, row_tokens, best_scores, best_tokens, num_blocks, JOINED_BLOCKS: tl.constexpr
):  # fmt: skip
    """Grid: row. The best of its blocks, the lowest token among equals."""
    row = tl.program_id(0).to(tl.int64)
    best_scores += row * num_blocks
    best_tokens += row * num_blocks
    best, token = tl.load(best_scores), tl.load(best_tokens)
    for begin in range(0, num_blocks, JOINED_BLOCKS):
        block = begin + tl.arange(0, JOINED_BLOCKS)
        score = tl.load(best_scores + block, mask=block < num_blocks, other=float("-inf"))
        top = tl.max(score, axis=0)
        first = tl.min(tl.where(score == top, block, num_blocks - 1), axis=0)
        if top > best:
            best, token = top, tl.load(best_tokens + first)
    tl.store(row_scores + row, best)
    tl.store(row_tokens + row, token.to(tl.int64))


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score of each row, float32 `[N]`, and its column, int64 `[N]`; ties go to the
    lowest column. Unlike torch's reduction, many programs share a row.

    Args:
        scores: float32 `[N, V]`, contiguous.
    """
    num_rows, num_tokens = scores.shape
    assert scores.is_contiguous(), scores.stride()
    of_blocks = _empty_bests(scores)
    num_blocks = of_blocks[0].shape[1]
    best_kernel[num_rows, num_blocks](
        *of_blocks, scores, num_tokens, num_blocks, BLOCK_TOKENS=BLOCK_TOKENS
    )
    return _join(*of_blocks)


def argmax(scores: Tensor) -> Tensor:
    """The columns of `best`."""
    return best(scores.contiguous())[1]


def draw(scores: Tensor, keys: Tensor, first_id: int = 0) -> Tensor:
    """Semantics: argmax over i of scores[n, i] + gumbel(seed n, id, position n, sample n), where id
    is first_id + i.

    Args:
        scores: float32 `[N, V]`, contiguous; -inf where a token may not win.
        keys: int64 `[N, 3]`, contiguous: seed, output position, sample index.
        first_id: the token of the first column.

    Returns:
        int64 `[N]`; ties go to the lowest column.
    """
    num_rows, num_tokens = scores.shape
    assert scores.is_contiguous() and keys.is_contiguous(), (scores.stride(), keys.stride())
    floors, tables = scores.new_empty(num_rows), philox.log_tables(scores.device)
    floor_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
        floors, *best(scores), first_id, keys, *tables, num_rows, BLOCK_ROWS=BLOCK_ROWS
    )
    of_blocks = _empty_bests(scores)
    num_blocks = of_blocks[0].shape[1]
    draw_kernel[num_rows, num_blocks](
        *of_blocks,
        scores,
        floors,
        first_id,
        keys,
        *tables,
        num_tokens,
        num_blocks,
        BLOCK_TOKENS=BLOCK_TOKENS,
    )
    return _join(*of_blocks)[1]


def _empty_bests(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors for the best of each block of tokens: scores float32 and tokens int32, `[N,
    blocks]`."""
    best_scores = scores.new_empty(len(scores), triton.cdiv(scores.shape[1], BLOCK_TOKENS))
    return best_scores, torch.empty_like(best_scores, dtype=torch.int32)


def _join(best_scores: Tensor, best_tokens: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_blocks = best_scores.shape
    row_scores = best_scores.new_empty(num_rows)
    row_tokens = torch.empty(num_rows, dtype=torch.int64, device=best_scores.device)
    join_kernel[(num_rows,)](
        row_scores,
        row_tokens,
        best_scores,
        best_tokens,
        num_blocks,
        JOINED_BLOCKS=JOINED_BLOCKS,
    )
    return row_scores, row_tokens
