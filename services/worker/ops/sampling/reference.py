"""Reference: draws one token at a time, with Python integers.

The algorithm is Philox4x32-10 (Salmon et al. 2011) and the Gumbel-max trick. The constants and the
roundings are those of `sampling/philox.py`, which explains them.
"""

from __future__ import annotations

import struct

from torch import Tensor

from loraplex_services.worker.sampling import fixed_log as fl
from loraplex_services.worker.sampling.philox import (
    MULTIPLIER_0,
    MULTIPLIER_1,
    NOISE_BITS,
    NUM_ROUNDS,
    WEYL_0,
    WEYL_1,
    WORD,
)

Counter = tuple[int, int, int, int]


def philox_scalar(counter: Counter, key: tuple[int, int]) -> Counter:
    """Philox4x32-10 of one counter: four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def gumbel_scalar(seed: int, token_id: int, position: int, sample_index: int) -> float:
    """The noise of one token, as a Python float that holds a float32 exactly."""
    counter = (token_id, position, sample_index, 0)
    word = philox_scalar(counter, (seed & WORD, seed >> 32 & WORD))[0]
    exponential = 33 * fl.LN2 - fl.ln_fixed(2 * word + 1)
    noise = fl.FRACTION_BITS * fl.LN2 - fl.ln_fixed(exponential)
    rounded: float = struct.unpack("<f", struct.pack("<f", noise >> (38 - NOISE_BITS)))[0]
    return rounded * 2.0**-NOISE_BITS


def draw(scores: Tensor, keys: Tensor) -> list[int]:
    """argmax over tokens of score + noise, added in float32; ties go to the lowest id.

    Args:
        scores: float32 `[N, V]`; -inf where a token may not win.
        keys: int64 `[N, 3]`: seed, output position, sample index.
    """
    drawn = []
    for row, (seed, position, sample_index) in zip(scores, keys.tolist(), strict=True):
        noise = [gumbel_scalar(seed, token, position, sample_index) for token in range(len(row))]
        drawn.append(int((row + row.new_tensor(noise)).argmax()))
    return drawn
