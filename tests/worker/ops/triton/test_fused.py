"""The small fused kernels against the references of their operations."""

import pytest
import torch

from loraplex_services.worker.ops.activation import reference as activation
from loraplex_services.worker.ops.activation.triton import silu_and_multiply
from loraplex_services.worker.ops.norm.reference import rms_norm
from loraplex_services.worker.ops.norm.triton import add_rms_norm
from loraplex_services.worker.ops.rope.reference import rotate
from loraplex_services.worker.ops.rope.triton import rotate_and_append

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
