"""SwiGLU on GPUs: silu(gate) * up in one launch, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.ops.early import early_start, wait_for_previous

BLOCK_COLUMNS = 1024


@triton.jit
def silu_and_multiply_kernel(
    out, gate_up, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid: (row, block of columns)."""
    wait_for_previous(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=mask)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Semantics: y[t, i] = silu(x[t, i]) * x[t, F + i].

    Args:
        gate_up: `[T, 2 F]`, contiguous.

    Returns:
        `[T, F]`.
    """
    num_rows, double_width = gate_up.shape
    assert gate_up.is_contiguous(), gate_up.stride()
    width = double_width // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(width, BLOCK_COLUMNS))
    silu_and_multiply_kernel[grid](
        out, gate_up, WIDTH=width, BLOCK_COLUMNS=BLOCK_COLUMNS, **early_start(out.device)
    )
    return out
