"""Eight-bit codes that keys and values may be stored as, with a scale for each token and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

KV_CODES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The types of codes by their names in `--kv-cache-dtype`."""
LARGEST: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The code of the largest magnitude of a token's head."""

Scales: TypeAlias = tuple[Tensor, Tensor] | tuple[None, None]
"""The scales of K and V of a layer, each `[num_blocks, Hkv, T]` in the blocks of its plane."""
NO_SCALES: Scales = (None, None)
"""Planes in the model's dtype have no scales."""


def code_bits(planes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The planes as Triton kernels take them: see `triton_codes`."""
    if planes[0].dtype is not torch.float8_e4m3fn:
        return planes
    return planes[0].view(torch.uint8), planes[1].view(torch.uint8)


def encode(items: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest codes of `[..., D]`, and their scales `[...]`: items = codes * scales."""
    largest = LARGEST[dtype]
    scales = (items.abs().amax(-1).float() / largest).to(scale_dtype)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).float()
    codes = (items.float() / divisors[..., None]).clamp(-largest, largest)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 `[..., D]` of codes `[..., D]` and their scales `[...]`."""
    return codes.float() * scales.float()[..., None]
