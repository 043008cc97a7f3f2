"""Random weights in codes, and rows to multiply."""

import torch

from loraplex_services.worker.ops.linear.coded import FLOAT8, INTEGERS, CodedWeight

FLOATS = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
"""All values; two of them are no numbers."""


def weight_in_codes(shape, kind, group_size, *, has_zeros=False, scales=torch.bfloat16, seed=0):
    """Random codes of every value, and scales that differ between groups."""
    generator = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs = shape
    groups = num_outputs, -(-num_inputs // group_size)
    scale = (torch.rand(groups, generator=generator) + 0.1).to(scales) / 64
    zeros = None
    if has_zeros:
        low, high = (-128, 128) if kind == "int8" else (0, 16)
        zeros = torch.randint(low, high, groups, generator=generator).float()
        if has_zeros is not True:  # zero points that are no integers, some of them large
            zeros = (zeros + has_zeros) * 100 ** torch.rand(groups, generator=generator)
    if kind == "float8":
        numbers = FLOATS.view(torch.uint8)[~FLOATS.float().isnan()]
        codes = numbers[torch.randint(0, 254, shape, generator=generator)].view(FLOAT8)
        return CodedWeight("test", codes, scale, group_size)
    if kind == "int8":
        codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
        return CodedWeight("test", codes, scale, group_size, zeros)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    table = INTEGERS if has_zeros else INTEGERS - 8
    return CodedWeight("test", codes, scale, group_size, zeros, table)


def rows_between_nans(num_rows, num_inputs, dtype):
    """Rows whose neighbours in memory are no numbers; some inputs are much larger than others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.full((num_rows, num_inputs + 3), float("nan"), dtype=dtype)[:, :num_inputs]
    values = torch.randn(num_rows, num_inputs, generator=generator)
    values[:, ::17] *= 20
    return x.copy_(values)
