"""top_k, top_p and min_p on GPUs without sorting.

The result is that of `sampling.masks.truncate`, token for token. One program works on one row:

1. A pass over the row sums the masses and counts tokens in bins of depth below the best score.
2. The counts name a bin behind which neither limit can lie. A second pass copies the scores before
   it, usually a few hundred, to a workspace. Where they do not fit, the row itself is searched.
3. A binary search over the bits of the scores finds the threshold of top_k, and another one that of
   top_p. Masses are integers (`sampling/fixed_exp.py`), so the order of a sum changes nothing.
4. A last pass removes what lies below the threshold, the later ids among those equal to it, and
   what min_p forbids.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.sampling import fixed_exp
from loraplex_services.worker.transfers import to_device

BLOCK_TOKENS = 8192
NUM_WARPS = 16
NUM_BINS = 64

BEST_MASS = tl.constexpr(1 << fixed_exp.MASS_BITS)
PRODUCT_SHIFT = tl.constexpr(fixed_exp.PRODUCT_SHIFT)
DEEPEST, SCALE = tl.constexpr(fixed_exp.DEEPEST), tl.constexpr(fixed_exp.SCALE)
FRACTION_BITS, REST_BITS = tl.constexpr(fixed_exp.FRACTION_BITS), tl.constexpr(fixed_exp.REST_BITS)
REST_MASK = tl.constexpr((1 << fixed_exp.REST_BITS) - 1)
INDEX_MASK = tl.constexpr((1 << fixed_exp.INDEX_BITS) - 1)
LN2_16, SERIES_ONE = tl.constexpr(fixed_exp.LN2_16), tl.constexpr(1 << fixed_exp.SERIES_BITS)
C_SHIFT = tl.constexpr(fixed_exp.FRACTION_BITS + 16 - fixed_exp.SERIES_BITS)
BIN_SHIFT = tl.constexpr(21)
"""From bin to bin probability falls by the square root of 2; the last bin holds all that is deeper.
More bins would cost more instructions a token than the candidates that they save."""
LOWEST_KEY, HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def depth_units(scores, best):
    """u of `fixed_exp`: the distance of scores to the best one, int32."""
    depths = best - scores
    return (tl.where(depths < DEEPEST, depths, DEEPEST) * SCALE).to(tl.int32)


@triton.jit
def mass_of(u, powers):
    """`fixed_exp.masses` of int32 depth units."""
    c = ((u & REST_MASK) * LN2_16) >> C_SHIFT
    c8 = c >> 8
    series = SERIES_ONE - c + ((c8 * c8) >> 15)
    power = tl.load(powers + ((u >> REST_BITS) & INDEX_MASK))
    shift = PRODUCT_SHIFT + (u >> FRACTION_BITS)
    return (power.to(tl.int64) * series.to(tl.int64)) >> shift.to(tl.int64)


@triton.jit
def key_of(scores):
    """int32 in the order of the scores; both zeros have one key."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ HIGHEST_KEY)


@triton.jit
def score_of(key):
    """The score that has a key."""
    bits = tl.where(key >= 0, key, key ^ HIGHEST_KEY).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def count_from(key, scores, length, BLOCK: tl.constexpr):
    """How many of the scores have at least this key."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < length, other=float("-inf"))
        total += ((i < length) & (key_of(score) >= key)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def mass_above(key, scores, length, best, powers, BLOCK: tl.constexpr):
    """The mass of the scores that have a higher key."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < length, other=float("-inf"))
        mass = mass_of(depth_units(score, best), powers)
        total += tl.where(key_of(score) > key, mass, 0)
    return tl.sum(total, axis=0)


@triton.jit
def ceiling(value):
    """The least int64 that is not below a float64 >= 0."""
    floor = value.to(tl.int64)
    return floor + (floor.to(tl.float64) < value).to(tl.int64)


@triton.jit
def survey(scores, num_tokens, best, powers, BLOCK: tl.constexpr, NUM_BINS: tl.constexpr):
    """The first pass: tokens that are not -inf in each bin, int32 `[NUM_BINS]`, and their mass."""
    counts = tl.zeros((NUM_BINS,), tl.int32)
    total = tl.zeros((BLOCK,), tl.int64)
    num_absent = 0
    for begin in range(0, num_tokens, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < num_tokens, other=float("-inf"))
        u = depth_units(score, best)
        total += mass_of(u, powers)
        num_absent += tl.sum((score == float("-inf")).to(tl.int32), axis=0)
        counts += tl.histogram(tl.minimum(u >> BIN_SHIFT, NUM_BINS - 1), NUM_BINS)
    counts -= tl.where(tl.arange(0, NUM_BINS) == NUM_BINS - 1, num_absent, 0)
    return counts, tl.sum(total, axis=0)


@triton.jit
def last_bin(counts, top_k, total, need, powers, NUM_BINS: tl.constexpr):
    """The bin that the thresholds cannot lie behind: with it there are `top_k` tokens where that is
    a limit, else all but less than total - need of the mass, whatever is in the bins behind."""
    bins = tl.arange(0, NUM_BINS)
    if top_k < tl.sum(counts, axis=0):
        is_enough = tl.cumsum(counts, axis=0) >= top_k
    else:
        most = counts.to(tl.int64) * mass_of(bins << BIN_SHIFT, powers)
        is_enough = tl.sum(most, axis=0) - tl.cumsum(most, axis=0) <= total - need
    return tl.min(tl.where(is_enough, bins, NUM_BINS - 1), axis=0)


@triton.jit
def gather_candidates(scores, num_tokens, best, last, candidates, capacity, BLOCK: tl.constexpr,
                      NUM_BINS: tl.constexpr):  # fmt: skip
    """Copy at most `capacity` scores of bins up to `last`. Returns the lowest of their keys."""
    num_found = 0
    lowest = tl.full((BLOCK,), HIGHEST_KEY, tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < num_tokens, other=float("-inf"))
        depth_bin = tl.minimum(depth_units(score, best) >> BIN_SHIFT, NUM_BINS - 1)
        found = (depth_bin <= last) & (score > float("-inf"))
        lowest = tl.minimum(lowest, tl.where(found, key_of(score), HIGHEST_KEY))
        rank = num_found + tl.cumsum(found.to(tl.int32), axis=0) - 1
        tl.store(candidates + rank, score, mask=found & (rank < capacity))
        num_found += tl.sum(found.to(tl.int32), axis=0)
    tl.debug_barrier()
    return tl.min(lowest, axis=0), num_found


@triton.jit
def search_top_k(scores, length, lowest, highest, top_k, BLOCK: tl.constexpr):
    """The highest key that at least `top_k` scores reach."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if count_from(middle.to(tl.int32), scores, length, BLOCK) >= top_k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def search_top_p(scores, length, low, highest, need, best, powers, BLOCK: tl.constexpr):
    """The lowest key from `low` on above which the mass is less than `need`."""
    high = highest.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        mass = mass_above(middle.to(tl.int32), scores, length, best, powers, BLOCK)
        if mass < need:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def find_threshold(row_scores, num_tokens, best, top_k, top_p, candidates, capacity, powers,
                   BLOCK: tl.constexpr, NUM_BINS: tl.constexpr):  # fmt: skip
    """The tokens that top_k and top_p keep: all above a score, and the first few equal to it."""
    counts, total = survey(row_scores, num_tokens, best, powers, BLOCK, NUM_BINS)
    has_top_k = top_k < tl.sum(counts, axis=0)
    need = ceiling(top_p.to(tl.float64) * total.to(tl.float64))
    need = tl.maximum(need, 1)
    last = last_bin(counts, top_k, total, need, powers, NUM_BINS)
    lowest, length = gather_candidates(
        row_scores, num_tokens, best, last, candidates, capacity, BLOCK, NUM_BINS
    )
    scores = candidates
    if length > capacity:
        scores, length = row_scores, num_tokens
    highest = key_of(best)
    key, low = lowest, lowest.to(tl.int64) - 1
    quota = tl.full((), HIGHEST_KEY, tl.int32)
    if has_top_k:
        key = search_top_k(scores, length, lowest, highest, top_k, BLOCK)
        # No score has a key beyond the best one's, where key + 1 could overflow.
        num_above = 0
        if key < highest:
            num_above = count_from(key + 1, scores, length, BLOCK)
        quota = top_k - num_above
        low = key.to(tl.int64)
        mass = mass_of(depth_units(score_of(key), best), powers)
        total = mass_above(key, scores, length, best, powers, BLOCK) + quota * mass
        need = ceiling(top_p.to(tl.float64) * total.to(tl.float64))
        need = tl.maximum(need, 1)
    if top_p < 1.0:
        p_key = search_top_p(scores, length, low, highest, need, best, powers, BLOCK)
        left = need - mass_above(p_key, scores, length, best, powers, BLOCK)
        mass = mass_of(depth_units(score_of(p_key), best), powers)
        p_quota = tl.minimum((left + mass - 1) // mass, num_tokens).to(tl.int32)
        if p_key == key:
            p_quota = tl.minimum(p_quota, quota)
        key, quota = p_key, p_quota
    return key, quota


@triton.jit
def remove_tokens(scores, num_tokens, best, key, quota, min_mass, powers, BLOCK: tl.constexpr):
    """Set what is not kept to -inf; of the scores equal to the threshold the first `quota` stay."""
    num_equal = 0
    for begin in range(0, num_tokens, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < num_tokens, other=float("-inf"))
        keys = key_of(score)
        keep = keys > key
        is_equal = (keys == key).to(tl.int32)
        num_here = tl.sum(is_equal, axis=0)
        if num_here > 0:
            rank = num_equal + tl.cumsum(is_equal, axis=0) - is_equal
            keep = keep | ((is_equal > 0) & (rank < quota))
        num_equal += num_here
        keep = keep & (mass_of(depth_units(score, best), powers) >= min_mass)
        tl.store(scores + i, float("-inf"), mask=(i < num_tokens) & ~keep)


@triton.jit
def truncate_kernel(
    scores,
    limits,
    bests,
    candidates,
    powers,
    num_tokens,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    """Grid: one program for each row. Rows without a limit or without a token are left alone."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(limits + 3 * row).to(tl.int32)
    top_p, min_p = tl.load(limits + 3 * row + 1), tl.load(limits + 3 * row + 2)
    best = tl.load(bests + row)
    row_scores = scores + row * num_tokens
    has_threshold = (top_k < num_tokens) | (top_p < 1.0)
    if (has_threshold | (min_p > 0.0)) & (best > float("-inf")):
        key = tl.full((), LOWEST_KEY, tl.int32)
        quota = tl.full((), 0, tl.int32)
        if has_threshold:
            key, quota = find_threshold(
                row_scores, num_tokens, best, top_k, top_p, candidates + row * CAPACITY, CAPACITY,
                powers, BLOCK, NUM_BINS,
            )  # fmt: skip
        min_mass = ceiling(min_p.to(tl.float64) * BEST_MASS)
        remove_tokens(row_scores, num_tokens, best, key, quota, min_mass, powers, BLOCK)


def truncate(scores: Tensor, limits: Tensor) -> None:
    """See `sampling.masks.truncate`. Launches only: nothing waits for the device.

    Args:
        scores: float32 `[N, V]`, contiguous. Mutated: removed tokens become -inf.
        limits: float32 `[N, 3]`, contiguous: top_k, top_p, min_p.
    """
    num_rows, num_tokens = scores.shape
    assert scores.is_contiguous() and limits.is_contiguous(), (scores.stride(), limits.stride())
    candidates = scores.new_empty(num_rows, BLOCK_TOKENS)
    truncate_kernel[(num_rows,)](
        scores,
        limits,
        scores.amax(dim=-1),
        candidates,
        _powers(scores.device),
        num_tokens,
        BLOCK=BLOCK_TOKENS,
        CAPACITY=BLOCK_TOKENS,
        NUM_BINS=NUM_BINS,
        num_warps=NUM_WARPS,
    )


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """int32 `[128]`: the table of `fixed_exp`."""
    return to_device(torch.tensor(fixed_exp.TABLE, dtype=torch.int32), device)
