"""RMSNorm on GPUs: reads the row once and updates the residual in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.ops.early import early_start, wait_for_previous


@triton.jit
def add_rms_norm_kernel(
    out,
    residual,
    update,
    weight,
    row_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: one program for each row, which it holds in registers."""
    wait_for_previous(EARLY)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * row_stride + column
    x = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update + at, mask=mask, other=0.0).to(tl.float32)
        # Round as the separate addition would, so that the norm sees what the residual holds.
        x = x.to(residual.dtype.element_ty)
        tl.store(residual + at, x, mask=mask)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    w = tl.load(weight + column, mask=mask, other=0.0)
    if IN_FLOAT32:
        y = x * scale * w.to(tl.float32)
    else:
        rounded = (x * scale).to(out.dtype.element_ty)
        y = rounded.to(tl.float32) * w.to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float, in_float32: bool
) -> Tensor:
    """Semantics: residual += update; returns residual / rms(residual) * weight.

    Args:
        residual: `[T, H]`, contiguous. Mutated when there is an update.
        update: `[T, H]`, contiguous, or None.
        weight: `[H]`, offset included.
        in_float32: multiply before rounding to the dtype (Gemma), else after (Llama).
    """
    num_rows, width = residual.shape
    assert residual.is_contiguous(), residual.stride()
    assert update is None or update.is_contiguous(), "update must be contiguous"
    out = torch.empty_like(residual)
    add_rms_norm_kernel[(num_rows,)](
        out,
        residual,
        residual if update is None else update,
        weight,
        width,
        eps,
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        HAS_UPDATE=update is not None,
        IN_FLOAT32=in_float32,
        num_warps=8 if width > 2048 else 4,
        **early_start(out.device),
    )
    return out
