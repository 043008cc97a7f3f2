"""Triton functions that write and read keys and values as codes: see `kv_codes.py`.

The type of a pointer says what the codes are: int8, or the bits of float8 (e4m3) as uint8, because
the compiler has that type on some GPUs only. Float8 is read as 2^-8 of its value: as half
precision, it has the same sign, one bit more of the exponent, and seven more of the mantissa.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAREST_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: the low bits of a sum with it are the nearest integer."""
NEAREST_SMALL = tl.constexpr(16384.0)
"""2^14: the low bits of a sum with it are the nearest multiple of 2^-9."""
SMALLEST_NORMAL = tl.constexpr(0x3C800000)
"""The bits of 2^-6, below which float8 has a fixed step of 2^-9."""


@triton.jit
def widened(k, v, k_scales_at, v_scales_at, is_key, query):
    """Codes `[keys, dims]` in the dtype of `query`, and factors `[keys]` of scores, which keys are
    not multiplied with."""
    k_factors = _load_scales(k_scales_at, is_key, k.dtype)
    v_factors = _load_scales(v_scales_at, is_key, v.dtype)
    v = (_floats(v, tl.float32) * v_factors[:, None]).to(query.dtype)
    return _floats(k, query.dtype), v, k_factors


@triton.jit
def _floats(codes, DTYPE: tl.constexpr):
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return codes.to(DTYPE)


@triton.jit
def _load_scales(scales_at, is_key, CODE: tl.constexpr):
    """The factors of `_floats` of type CODE; 0 where there is no key."""
    scales = tl.load(scales_at, mask=is_key, other=0.0).to(tl.float32)
    return scales * 256.0 if CODE == tl.uint8 else scales


@triton.jit
def store_codes(x, codes_at, scales_at, is_head, mask):
    """Store float32 `x [heads, dims]`, zero where masked, as codes, and the scale of each head.

    A head with a value that is not finite gets a scale that is NaN or infinite.
    """
    CODE: tl.constexpr = codes_at.dtype.element_ty
    largest = tl.div_rn(tl.max(tl.abs(x), axis=1), 448.0 if CODE == tl.uint8 else 127.0)
    bits = (largest + tl.sum(x * 0.0, axis=1)).to(tl.uint32, bitcast=True)
    # To bfloat16; the interpreter would only cut the bits off.
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    scales = bits.to(tl.float32, bitcast=True)
    divisors = tl.where(scales > 0, scales, 1.0)[:, None] + tl.zeros_like(x)
    tl.store(codes_at, _encoded(tl.div_rn(x, divisors), CODE), mask=mask)
    tl.store(scales_at, scales.to(tl.bfloat16), mask=is_head)


@triton.jit
def _encoded(x, CODE: tl.constexpr):
    """The nearest codes."""
    if CODE == tl.uint8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        small = (tl.abs(x) + NEAREST_SMALL).to(tl.uint32, bitcast=True) & 15
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        code = tl.where(magnitude < SMALLEST_NORMAL, small, rounded - (120 << 3))
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        return (x + NEAREST_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
