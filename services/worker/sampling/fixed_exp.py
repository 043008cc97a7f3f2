"""Probability masses in fixed point, so that their sums do not depend on the order.

A token's mass is e**-depth in units of 2**-34, where depth is how far its score lies below the
row's best score. Sums of integers are the same in any order and on any device, so every backend
sees the sum of a nucleus cross `top_p` at the same token. Floating-point `exp` and float sums
differ in their last bits between libraries and devices.

With u = floor(depth * 6051102), which is depth * log2(e) in units of 2**-22, and u = (n, j, r) in
fields of 7 integer, 7 index and 15 rest bits:

    mass = TABLE[j] * (1 - c + c**2 / 2) >> (26 + n),    TABLE[j] = 2**30 * 2**(-j / 128)

where c = r * ln 2 in units of 2**-30. The product depth * 6051102 is one float32 multiplication;
all else is integers. The error is below one unit plus 2**-19 of the mass. Depths from 24 on have
mass 0.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

import torch
from torch import Tensor

MASS_BITS = 34
"""The best token's mass is 2**MASS_BITS."""
DEEPEST = 24.0
SCALE = 6051102.0
"""log2(e) * 2**22, rounded to an integer that float32 holds exactly."""
FRACTION_BITS = 22
INDEX_BITS = 7
REST_BITS = FRACTION_BITS - INDEX_BITS
SERIES_BITS = 30
LN2_16 = 45426
"""ln 2 in units of 2**-16."""
PRODUCT_SHIFT = 2 * SERIES_BITS - MASS_BITS


def _powers() -> tuple[int, ...]:
    """round(2**30 * 2**(-j / 128)) for each j."""
    with localcontext(Context(prec=40)):
        num = 1 << INDEX_BITS
        root = Decimal(2) ** (Decimal(-1) / num)  # a power of a fraction, which is slow, only once
        exact = (root**j * (1 << SERIES_BITS) for j in range(num))
        return tuple(int(value.to_integral_value()) for value in exact)


TABLE = _powers()


def masses(depths: Tensor) -> Tensor:
    """int64 masses of float32 depths >= 0 of any shape; NaN and infinity have mass 0."""
    table = torch.tensor(TABLE, device=depths.device)
    u = (torch.where(depths < DEEPEST, depths, DEEPEST) * SCALE).long()
    rest = u & ((1 << REST_BITS) - 1)
    c = (rest * LN2_16) >> (FRACTION_BITS + 16 - SERIES_BITS)
    c8 = c >> 8
    series = (1 << SERIES_BITS) - c + ((c8 * c8) >> 15)
    power = table[(u >> REST_BITS) & ((1 << INDEX_BITS) - 1)]
    return (power * series) >> (PRODUCT_SHIFT + (u >> FRACTION_BITS))
