"""Rotary embedding on GPUs: one launch rotates queries and writes keys and values to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.ops.attention.kv_codes import NO_SCALES, Scales, code_bits
from loraplex_services.worker.ops.attention.triton_codes import store_codes
from loraplex_services.worker.ops.early import early_start, let_next_start, wait_for_previous

BLOCK_HEADS = 8
"""Heads of one program: a program of one head moves too few bytes for its launch."""


@triton.jit
def _rotated(at, cos, sin, half, mask, HALF: tl.constexpr, OUT: tl.constexpr):
    """Both rotated halves of some heads, rounded where the plain product would round."""
    first = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + half, mask=mask, other=0.0).to(tl.float32)
    return (first * cos - second * sin).to(OUT), (second * cos + first * sin).to(OUT)


@triton.jit
def _rotated_keys(at, cos_at, sin_at, dim, is_dim, HALF: tl.constexpr):
    """Whole rotated heads as float32, rounded as in `_rotated`; 0 where not `is_dim`."""
    is_rotated = is_dim & (dim < 2 * HALF)
    x = tl.load(at + dim, mask=is_dim, other=0.0)
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    other = tl.load(at + partner, mask=is_rotated, other=0.0).to(tl.float32)
    cos = tl.load(cos_at, mask=dim < 2 * HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=dim < 2 * HALF, other=0.0).to(tl.float32)
    rotated = x.to(tl.float32) * cos + tl.where(dim < HALF, -other, other) * sin
    return tl.where(is_rotated, rotated.to(x.dtype).to(tl.float32), x.to(tl.float32))


@triton.jit
def rotate_and_append_kernel(
    q, k, v, cos, sin, k_plane, v_plane, k_scales, v_scales, kv_slots, q_stride, k_stride, v_stride,
    plane_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (token, block of query heads or, after those, of KV heads)."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    is_half = half < HALF
    cos_row = tl.load(cos + token * HALF + half, mask=is_half, other=0.0).to(tl.float32)
    sin_row = tl.load(sin + token * HALF + half, mask=is_half, other=0.0).to(tl.float32)
    num_q_blocks = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if block < num_q_blocks:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        mask = is_half & (head < NUM_HEADS)
        at = q + token * q_stride + head * HEAD_DIM
        first, second = _rotated(at, cos_row, sin_row, half, mask, HALF, q.dtype.element_ty)
        tl.store(at + half, first, mask=mask)
        tl.store(at + HALF + half, second, mask=mask)
    else:
        head = ((block - num_q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        is_head = head < NUM_KV_HEADS
        mask = is_half & is_head
        kv_slot = tl.load(kv_slots + token)
        if kv_slot >= 0:
            at = k + token * k_stride + head * HEAD_DIM
            to = (kv_slot // TOKENS) * plane_stride + (head * TOKENS + kv_slot % TOKENS) * HEAD_DIM
            if k_scales is None:
                first, second = _rotated(at, cos_row, sin_row, half, mask, HALF, k.dtype.element_ty)
                tl.store(k_plane + to + half, first, mask=mask)
                tl.store(k_plane + to + HALF + half, second, mask=mask)
            dim = tl.arange(0, BLOCK_DIM)[None, :]
            is_dim = is_head & (dim < HEAD_DIM)
            values_at = v + token * v_stride + head * HEAD_DIM + dim
            if k_scales is None:
                if 2 * HALF < HEAD_DIM:
                    is_rest = is_head & (dim >= 2 * HALF) & (dim < HEAD_DIM)
                    tl.store(k_plane + to + dim, tl.load(at + dim, mask=is_rest), mask=is_rest)
                tl.store(v_plane + to + dim, tl.load(values_at, mask=is_dim), mask=is_dim)
            else:
                turn_at = token * HALF + dim % HALF
                key = _rotated_keys(at, cos + turn_at, sin + turn_at, dim, is_dim, HALF)
                value = tl.load(values_at, mask=is_dim, other=0.0).to(tl.float32)
                scale_at = (kv_slot // TOKENS) * (plane_stride // 2) + kv_slot % TOKENS
                heads = (block - num_q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
                scales_at, has_scale = scale_at + heads * TOKENS, heads < NUM_KV_HEADS
                store_codes(key, k_plane + to + dim, k_scales + scales_at, has_scale, is_dim)
                store_codes(value, v_plane + to + dim, v_scales + scales_at, has_scale, is_dim)


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    planes: tuple[Tensor, Tensor],
    kv_slots: Tensor,
    scales: Scales = NO_SCALES,
) -> None:
    """Semantics: q[t, h] = R(t) q[t, h]; cache[kv_slots[t]] = R(t) k[t], v[t].

    R(t) rotates the pairs (i, i + dim / 2) of the leading dim components of each head.

    Args:
        q: `[T, Hq * D]`, rows contiguous. Mutated.
        k, v: `[T, Hkv * D]`, rows contiguous; not changed.
        cos_sin: contiguous `[T, 1, dim / 2]` each.
        planes: K and V of the layer, each `[num_blocks, Hkv, T, D]`. Mutated.
        kv_slots: int64 `[T]`: block * T + slot, or -1 for padding rows.
        scales: of planes of codes. Mutated.
    """
    _, num_kv_heads, num_tokens, head_dim = planes[0].shape
    cos, sin = cos_sin
    assert cos.is_contiguous() and sin.is_contiguous(), (cos.stride(), sin.stride())
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1, (q.stride(), k.stride(), v.stride())
    num_heads, half = q.shape[1] // head_dim, cos.shape[-1]
    num_blocks = triton.cdiv(num_heads, BLOCK_HEADS) + triton.cdiv(num_kv_heads, BLOCK_HEADS)
    rotate_and_append_kernel[(len(q), num_blocks)](
        q,
        k,
        v,
        cos,
        sin,
        *code_bits(planes),
        *scales,
        kv_slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        planes[0].stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_HEADS=BLOCK_HEADS,
        TOKENS=num_tokens,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=2,
        **early_start(q.device),
    )
