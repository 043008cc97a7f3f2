"""top_k, top_p and min_p on GPUs without sorting: which tokens of a row may still be drawn.

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

from services.worker.sampling import fixed_exp
from services.worker.transfers import to_device

BLOCK_TOKENS = 8192
NUM_WARPS = 16
NUM_BINS = 256

MASS_BITS, PRODUCT_SHIFT = tl.constexpr(fixed_exp.MASS_BITS), tl.constexpr(fixed_exp.PRODUCT_SHIFT)
DEEPEST, SCALE = tl.constexpr(fixed_exp.DEEPEST), tl.constexpr(fixed_exp.SCALE)
FRACTION_BITS, REST_BITS = tl.constexpr(fixed_exp.FRACTION_BITS), tl.constexpr(fixed_exp.REST_BITS)
REST_MASK = tl.constexpr((1 << fixed_exp.REST_BITS) - 1)
INDEX_MASK = tl.constexpr((1 << fixed_exp.INDEX_BITS) - 1)
LN2_16, SERIES_ONE = tl.constexpr(fixed_exp.LN2_16), tl.constexpr(1 << fixed_exp.SERIES_BITS)
C_SHIFT = tl.constexpr(fixed_exp.FRACTION_BITS + 16 - fixed_exp.SERIES_BITS)
BIN_SHIFT = tl.constexpr(19)
"""Bins are 2**-3 of a factor of two wide; the last one holds all that is deeper."""
LOWEST_KEY, HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def depth_units(scores, best):
    """u of `fixed_exp`: how far scores lie below the best one, int32."""
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
def above(at_least, is_strict: tl.constexpr, scores, length, best, powers, MASSES: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """How many of the scores have a key of `at_least` or more, or the sum of their masses."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score = tl.load(scores + i, mask=i < length, other=float("-inf"))
        found = (i < length) & (key_of(score).to(tl.int64) >= at_least)
        if MASSES:
            total += tl.where(found, mass_of(depth_units(score, best), powers), 0)
        else:
            total += found.to(tl.int64)
    return tl.sum(total, axis=0)
