"""Gumbel noise that depends only on (seed, sample, output position, token id).

Recipe, integers until the last step so that every backend draws the same bits:

1. x = first word of Philox4x32-10 with key (seed mod 2**32, seed >> 32) and
   counter (token id, output position, sample index, 0).
2. a = 2 x + 1, so u = a / 2**33 is uniform in (0, 1) and never an end.
3. e = 33 ln 2 - ln a = -ln u, in units of 2**-38 by `fixed_log`.
4. g = 38 ln 2 - ln e = -ln(-ln u), in units of 2**-38.
5. The noise is float32(g >> 14) * 2**-24: one rounding to nearest even, one exact product.

It lies in [-3.14, 22.9]. `gumbel` computes it in torch; `ops/sampling/reference.py` is the
reference in plain Python.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from loraplex_services.worker.sampling import fixed_log as fl
from loraplex_services.worker.transfers import to_device

WORD = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10

GUMBEL_MIN = -3.14
GUMBEL_MAX = 22.9
NOISE_BITS = 24


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of broadcastable int64 tensors of words in [0, 2**32).

    64-bit products wrap; `>> 32` followed by the mask still yields their high word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD
        c2, c3 = (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


@functools.cache
def log_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 `[128]` each: inverses and logarithms of `fixed_log`."""
    return to_device(torch.tensor(fl.INVERSES), device), to_device(torch.tensor(fl.LOGS), device)


def ln_fixed(value: Tensor) -> Tensor:
    """`fixed_log.ln_fixed` of an int64 tensor, bit for bit."""
    inverses, logs = log_tables(value.device)
    exponent = torch.frexp(value.double()).exponent.long() - 1
    mantissa = value << (fl.MANTISSA_BITS - exponent)
    interval = (mantissa >> (fl.MANTISSA_BITS - fl.INDEX_BITS)) - (1 << fl.INDEX_BITS)
    reduced = mantissa * inverses[interval] - (1 << fl.REDUCED_BITS)
    r = reduced >> (fl.REDUCED_BITS - fl.FRACTION_BITS)
    square = (r * r) >> fl.FRACTION_BITS
    series = fl.QUARTER - ((r * fl.FIFTH) >> fl.FRACTION_BITS)
    series = fl.THIRD - ((r * series) >> fl.FRACTION_BITS)
    series = fl.HALF - ((r * series) >> fl.FRACTION_BITS)
    return exponent * fl.LN2 + logs[interval] + r - ((square * series) >> fl.SERIES_BITS)


def gumbel(seeds: Tensor, token_ids: Tensor, positions: Tensor, sample_indices: Tensor) -> Tensor:
    """Noise float32 of the broadcast shape.

    Args:
        seeds: int64, the 64 seed bits as two's complement.
        token_ids, positions, sample_indices: int64 in [0, 2**32).
    """
    key = (seeds & WORD, seeds >> 32 & WORD)
    counter = (token_ids, positions, sample_indices, torch.zeros_like(token_ids))
    word = philox(counter, key)[0]
    exponential = 33 * fl.LN2 - ln_fixed(2 * word + 1)
    noise = fl.FRACTION_BITS * fl.LN2 - ln_fixed(exponential)
    return (noise >> (fl.FRACTION_BITS - NOISE_BITS)).float() * 2.0**-NOISE_BITS
