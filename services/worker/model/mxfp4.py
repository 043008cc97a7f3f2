"""Dequantises four-bit weights of the microscaling format MXFP4 when a base is loaded.

Numbers of one sign, two exponent and one mantissa bit lie in pairs, the first in the lower half of
a byte. Each 32 of them share a power of two, stored as exponent + 127. Half precision holds every
product exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.load import Weights

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, PAIRS, BIAS = 32, 16, 127
NO_NUMBER = 255


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int]) -> Tensor:
    """The weight `[experts, out, in]` that `name_blocks` and `name_scales` hold.

    Raises InvalidRequest for a scale that is no number.
    """
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, num_outputs, num_inputs // GROUP)
    blocks = weights.take(f"{name}_blocks", (*groups, PAIRS), dtype=torch.uint8)
    scales = weights.take(f"{name}_scales", groups, dtype=torch.uint8)
    if scales.eq(NO_NUMBER).any():
        raise InvalidRequest.field(f"{name}_scales", NO_NUMBER, "is no scale in MXFP4, but NaN")
    weight = torch.empty(shape, dtype=weights.dtype, device=blocks.device)
    for expert in range(num_experts):  # one by one: what lies between takes eight times as much
        weight[expert] = dequantised(blocks[expert], scales[expert])
    return weight


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 `[out, groups, 16]` and `[out, groups]` -> float32 `[out, groups * 32]`."""
    table = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(table[codes.int()], exponents).flatten(-2)
