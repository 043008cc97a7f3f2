"""The small fused kernels against the references of their operations."""

import pytest
import torch

from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import plan_kv_groups
from loraplex_services.worker.ops.activation import reference as activation
from loraplex_services.worker.ops.activation.triton import silu_and_multiply
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES, decode, encode
from loraplex_services.worker.ops.norm.reference import rms_norm
from loraplex_services.worker.ops.norm.triton import add_rms_norm
from loraplex_services.worker.ops.rope.reference import rotate
from loraplex_services.worker.ops.rope.triton import rotate_and_append
from loraplex_services.worker.types.model_config import KvHeads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("has_update", [False, True])
def test_norm_equals_addition_and_plain_norm(dtype, in_float32, has_update, device):
    torch.manual_seed(0)
    x, update = (torch.randn(3, 37, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(37, device=device).to(torch.float32 if in_float32 else dtype)
    residual = x + update if has_update else x.clone()
    expected = rms_norm(residual, weight, 1e-6).to(dtype)
    actual = add_rms_norm(x, update if has_update else None, weight, 1e-6, in_float32)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x, residual, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_equals_silu_times_up(dtype, device):
    torch.manual_seed(0)
    gate_up = torch.randn(2, 2 * 1027, device=device).to(dtype)
    expected = activation.silu_and_multiply(gate_up).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(silu_and_multiply(gate_up), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim,half", [(16, 8), (12, 4)])
@pytest.mark.parametrize("heads", [(3, 2), (11, 9)], ids=str)
def test_rotation_turns_queries_and_fills_the_cache(dtype, head_dim, half, heads, device):
    torch.manual_seed(0)
    num_kv_heads = heads[1]
    sizes = [num * head_dim for num in (*heads, num_kv_heads)]
    qkv = torch.randn(4, sum(sizes), device=device).to(dtype)
    q, k, v = (part.clone() for part in qkv.split(sizes, dim=-1))
    angles = torch.rand(4, 1, half, device=device) * 6
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    angles_of_tokens = [x.squeeze(1) for x in cos_sin]
    planes = torch.full((2, 5, num_kv_heads, 16, head_dim), float("nan"), device=device).to(dtype)
    kv_slots = torch.tensor([3 * 16 + 5, -1, 0, 4 * 16 + 15], device=device)
    q_out, k_out, v_out = before = qkv.split(sizes, dim=-1)
    rotate_and_append(q_out, k_out, v_out, cos_sin, (planes[0], planes[1]), kv_slots)
    tolerance = TOLERANCE[dtype]
    turned_q, turned_k = (
        rotate(x.view(4, -1, head_dim), *angles_of_tokens).to(dtype) for x in (q, k)
    )
    torch.testing.assert_close(before[0], turned_q.flatten(1), rtol=tolerance, atol=tolerance)
    for token, block, slot in [(0, 3, 5), (2, 0, 0), (3, 4, 15)]:
        torch.testing.assert_close(
            planes[0, block, :, slot], turned_k[token], rtol=tolerance, atol=tolerance
        )
        assert planes[1, block, :, slot].equal(v[token].view(num_kv_heads, head_dim))
    assert int((~planes.isnan()).sum()) == 3 * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim,half", [(16, 8), (12, 4)])
@pytest.mark.parametrize("kept", KV_CODES)
def test_rotation_fills_a_cache_of_codes(kept, dtype, head_dim, half, device):
    torch.manual_seed(0)
    groups = plan_kv_groups([None], [KvHeads(9, head_dim)], 1, scale_bytes=2)
    arena = ArenaBuffer(5, groups.block_bytes, device)
    arena.data.fill_(0x7F)
    kv = KvBuffer(arena, groups, dtype, KV_CODES[kept])
    q, k, v = (torch.randn(4, num * head_dim, device=device).to(dtype) for num in (3, 9, 9))
    angles = torch.rand(4, 1, half, device=device) * 6
    cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
    kv_slots = torch.tensor([3 * 16 + 5, -1, 0, 4 * 16 + 15], device=device)
    planes = torch.zeros((2, 5, 9, 16, head_dim), device=device).to(dtype)
    rotate_and_append(q.clone(), k, v, cos_sin, (planes[0], planes[1]), kv_slots)
    rotate_and_append(q, k, v, cos_sin, kv.planes(0), kv_slots, kv.scales(0))
    places = [(3, 5), (0, 0), (4, 15)]
    for plane, scales, values in zip(kv.planes(0), kv.scales(0), planes, strict=True):
        for block, slot in places:
            new = values[block, :, slot]
            found = decode(plane[block, :, slot], scales[block, :, slot])
            error = (found - decode(*encode(new, plane.dtype, scales.dtype))).abs()
            # A rounding error may move a code to its neighbour, now and then.
            step = new.float().abs().amax() / (14 if kept == "fp8" else 127)
            assert error.max() <= 1.1 * step
            assert (error <= 0.01 * step).float().mean() >= 0.9
    assert int((arena.data != 0x7F).sum()) <= len(places) * 2 * 9 * (head_dim + 2)
