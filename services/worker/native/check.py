"""Compares a library with torch when it is loaded; one with wrong results is not used.

This guards against errors of compilers and processors that we have not tested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.native.codes import CodeKind, PackedCodes
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.sampling.drawing import draw

if TYPE_CHECKING:  # it imports this module
    from loraplex_services.worker.native.bindings import Native

TOLERANCE = 1e-4
FEW_ROWS = 5
REPEATS = 3
"""With this many times the rows, `linear` takes several blocks that share weights, at every
level."""


def computes_right(native: Native) -> bool:
    """Whether products, norms, gates and draws agree with torch on odd shapes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 37, generator=generator)
    weight = torch.randn(70, 37, generator=generator)
    pairs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = weight.to(dtype)
        packed, expected = native.pack(stored), _product(x, stored.float())
        for repeats in (1, REPEATS):
            product = native.linear(x.repeat(repeats, 1), packed, len(weight))
            pairs.append((product, expected.repeat(repeats, 1)))
    half = x.bfloat16()
    product = native.linear(half, native.pack(weight), len(weight)).float()
    pairs.append((product, _product(half.float(), weight).bfloat16().float()))
    if native.has_tiles:
        tiled = native.linear_tiles(half, native.pack_tiles(weight.bfloat16()), len(weight))
        expected = _product(half.float(), weight.bfloat16().float())
        pairs.append((tiled.float(), expected.bfloat16().float()))
    if native.has_fixed:
        exact_x, exact = (values.mul(16).round().div(16) for values in (x, weight))
        packed, expected = native.pack_fixed(exact), _product(exact_x, exact)
        for repeats in (1, REPEATS):
            product = native.linear_fixed(exact_x.repeat(repeats, 1), packed, len(weight))
            pairs.append((product, expected.repeat(repeats, 1)))
    pairs += _products_of_codes(native, x, generator)
    scale = x.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    pairs.append((native.norm(x, None, weight[0], 1e-5, True), x * scale * weight[0]))
    gated = native.elementwise(Operation.SILU, product, product)
    pairs.append((gated, F.silu(product) * product))
    keys = torch.arange(39).view(13, 3)
    if not native.draw(x, keys).equal(draw(x, keys)):
        return False
    return all(_agree(actual, expected) for actual, expected in pairs)


def _products_of_codes(
    native: Native, x: Tensor, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of weights in each kind of codes, with a scale for each output: in one
    block and in several, with many rows and with few, for which AMX has three kernels."""
    pairs, (num_panels, num_outputs, num_inputs) = [], (3, 70, x.shape[1])
    scales = torch.rand(num_panels, 1, 32, generator=generator) / 64
    for kind, num_values in ((CodeKind.INT8, 256), (CodeKind.INT4, 16), (CodeKind.FLOAT8, 127)):
        codes = torch.randint(0, num_values, (num_outputs, num_inputs), generator=generator)
        codes, zero = codes.to(torch.uint8), num_values // 2
        values = codes.float() - zero
        if kind is CodeKind.FLOAT8:
            values = codes.view(torch.float8_e4m3fn).float()
        packed = native.pack_codes(codes, kind)
        weight = PackedCodes(
            num_outputs, num_inputs, kind, packed, scales, None, zero, num_inputs, 128
        )
        dense = values * scales.flatten()[:num_outputs, None]
        pairs.append((native.linear_codes(x, weight), _product(x, dense)))
        half = x.bfloat16()
        expected = _product(half.float(), dense).bfloat16().float()
        for block_size in (128, 16):
            own = replace(weight, block_size=block_size)
            for num_rows in (len(x), FEW_ROWS, 1):
                found = native.linear_codes(half[:num_rows], own).float()
                pairs.append((found, expected[:num_rows]))
    return pairs


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` row by row, so that neither its library nor torch's threads begin for it, which
    takes tenths of a second."""
    return torch.stack([(row * weight).sum(-1) for row in x])


def _agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether results agree within rounding. A bfloat16 product may differ in the last place."""
    error = (actual - expected).abs()
    is_close = error <= TOLERANCE + expected.abs() / 100
    return bool(is_close.all()) and bool(error.median() <= TOLERANCE)
