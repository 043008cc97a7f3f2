"""Natural logarithm in fixed point, with integers only.

Floating-point `log` differs in its last bits between libraries and devices; sums, products and
shifts of integers do not. Tables and constants come from `decimal`, never from a libm.

For 1 <= v < 2**44 let e = floor(log2 v) and m = v << (43 - e), so m / 2**43 is in [1, 2). The top
seven fraction bits of m choose an inverse `inv = INVERSES[j]` (eleven bits at most), so that
r = m * inv / 2**53 - 1 is exact and |r| < 2**-6.9. Then

    ln v = e ln 2 + LOGS[j] + ln(1 + r),    LOGS[j] = -ln(inv / 2**10)

with ln(1 + r) = r - r**2 (1/2 - r (1/3 - r (1/4 - r/5))) to r**5. All in units of 2**-38; every
right shift rounds down. The first interval has inv = 1 and the last inv = 1/2, so differences of
logarithms near a power of two keep their relative precision. Error below 2**-33.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

FRACTION_BITS = 38
MANTISSA_BITS = 43
INDEX_BITS = 7
INVERSE_BITS = 10
SERIES_BITS = 30
REDUCED_BITS = MANTISSA_BITS + INVERSE_BITS

HALF, THIRD, QUARTER, FIFTH = ((1 << SERIES_BITS) // n for n in (2, 3, 4, 5))


def _scaled_ln(numerator: int, denominator: int) -> int:
    """round(2**38 * ln(numerator / denominator)), half to even."""
    with localcontext(Context(prec=60)):
        value = (Decimal(numerator) / Decimal(denominator)).ln() * (1 << FRACTION_BITS)
        return int(value.to_integral_value())


def _inverse(interval: int) -> int:
    """2**10 / c rounded, c the middle of the interval; exact ends for the first and the last."""
    num_intervals = 1 << INDEX_BITS
    if interval == 0:
        return 1 << INVERSE_BITS
    if interval == num_intervals - 1:
        return 1 << (INVERSE_BITS - 1)
    middle = 2 * (num_intervals + interval) + 1
    return (2 * (1 << (INVERSE_BITS + INDEX_BITS + 1)) + middle) // (2 * middle)


LN2 = _scaled_ln(2, 1)
INVERSES = tuple(_inverse(interval) for interval in range(1 << INDEX_BITS))
LOGS = tuple(
    LN2 if inv == 1 << (INVERSE_BITS - 1) else _scaled_ln(1 << INVERSE_BITS, inv)
    for inv in INVERSES
)


def ln_fixed(value: int) -> int:
    """ln(value) in units of 2**-38, for 1 <= value < 2**44. The scalar reference."""
    assert 1 <= value < 1 << (MANTISSA_BITS + 1), value
    exponent = value.bit_length() - 1
    mantissa = value << (MANTISSA_BITS - exponent)
    interval = (mantissa >> (MANTISSA_BITS - INDEX_BITS)) - (1 << INDEX_BITS)
    reduced = mantissa * INVERSES[interval] - (1 << REDUCED_BITS)
    r = reduced >> (REDUCED_BITS - FRACTION_BITS)
    square = (r * r) >> FRACTION_BITS
    series = QUARTER - ((r * FIFTH) >> FRACTION_BITS)
    series = THIRD - ((r * series) >> FRACTION_BITS)
    series = HALF - ((r * series) >> FRACTION_BITS)
    return exponent * LN2 + LOGS[interval] + r - ((square * series) >> SERIES_BITS)
