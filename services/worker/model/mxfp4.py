"""Dequantises four-bit weights of the microscaling format MXFP4 when a base is loaded.

Numbers of one sign, two exponent and one mantissa bit lie in pairs, the first in the lower half of
a byte. Each 32 of them share a power of two, stored as exponent + 127. Half precision holds every
product exactly.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.load import TensorWindow, Weights

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, PAIRS, BIAS = 32, 16, 127
NO_NUMBER = 255


def take_mxfp4(
    weights: Weights, name: str, shape: tuple[int, int, int], window: TensorWindow | None
) -> Tensor:
    """The weight `[experts, out, in]` that `name_blocks` and `name_scales` hold, or a window of
    its outputs and inputs.

    Raises InvalidRequest for a scale that is NaN.
    """
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, num_outputs, num_inputs // GROUP)
    blocks = weights.take(f"{name}_blocks", (*groups, PAIRS), dtype=torch.uint8)
    scales = weights.take(f"{name}_scales", groups, dtype=torch.uint8)
    if scales.eq(NO_NUMBER).any():
        raise InvalidRequest.field(f"{name}_scales", NO_NUMBER, "is not a scale in MXFP4 but NaN")
    own = None if window is None else replace(window, dim=window.dim - 1)
    weight = None
    for expert in range(num_experts):  # intermediate tensors are eight times as large
        wide = dequantised(blocks[expert], scales[expert])
        part = wide if own is None else own.cut(wide)
        if weight is None:
            weight = part.new_empty(num_experts, *part.shape, dtype=weights.dtype)
        weight[expert] = part
    assert weight is not None, "config.json has experts"
    return weight


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 `[out, groups, 16]` and `[out, groups]` -> float32 `[out, groups * 32]`."""
    table = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(table[codes.int()], exponents).flatten(-2)
