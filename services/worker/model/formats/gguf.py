"""Blocks of GGUF files, as ggml defines them: consecutive inputs of a row with their scales.

The K types have blocks of 256 inputs, in groups whose scales are integers times one of the block.
`Q4_K` and `Q5_K` also subtract an offset from each group, which here becomes a zero point.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import GGUF_BLOCKS, Scheme
from loraplex_services.worker.model.formats.words import StoredTensors, checked, signed, stored
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight


def read_q8_0(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is a float16 scale and 32 int8 codes."""
    blocks = _blocks(files, module, shape, scheme.layout)
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return CodedWeight(scheme.name, codes, _scales(blocks, module), 32)


def read_q4_0(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is a float16 scale and 16 bytes: the first 16 inputs lie in their
    lower halves, the others in the upper ones."""
    blocks = _blocks(files, module, shape, scheme.layout)
    codes = _halves(blocks[..., 2:]).flatten(1)
    return CodedWeight(scheme.name, codes, _scales(blocks, module), 32, table=INTEGERS - 8)


def read_q5_0(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. As `Q4_0`, with four bytes before the codes that hold the fifth bits, the
    first input's lowest."""
    blocks = _blocks(files, module, shape, scheme.layout)
    low = _halves(blocks[..., 6:]).unflatten(2, (4, 8))
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = blocks[..., 2:6, None] >> bits & 1
    codes = (low | high << 4).flatten(1)
    return CodedWeight(scheme.name, signed(codes + 112), _scales(blocks, module), 32)


def read_q4_k(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is two float16 factors, 12 bytes of scales and offsets, and for
    each 64 inputs 32 bytes: the first 32 lie in their lower halves, the others in the upper
    ones."""
    blocks = _blocks(files, module, shape, scheme.layout)
    codes = _halves(blocks[..., 16:].unflatten(2, (4, 32))).flatten(1)
    return _with_offsets(CodedWeight(scheme.name, codes, *_factors(blocks, module), INTEGERS))


def read_q5_k(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. As `Q4_K`, with 32 bytes before the codes: byte i holds the fifth bits of
    input i of each group, the first group's lowest."""
    blocks = _blocks(files, module, shape, scheme.layout)
    low = _halves(blocks[..., 48:].unflatten(2, (4, 32))).unflatten(2, (8, 32))
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = low | (blocks[..., None, 16:48] >> bits & 1) << 4
    codes = codes.view(torch.int8).flatten(1)
    return _with_offsets(CodedWeight(scheme.name, codes, *_factors(blocks, module)))


def read_q6_k(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is the lower four bits of all codes, the upper two, an int8 scale
    for each 16 inputs, and a float16 factor. Both kinds of bits lie in two halves of 128 inputs:
    64 bytes with inputs 0 to 63 and 64 to 127, and 32 bytes with four inputs each, 32 apart."""
    blocks = _blocks(files, module, shape, scheme.layout)
    low = _halves(blocks[..., :128].unflatten(2, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].unflatten(2, (2, 1, 32)) >> shifts & 3).flatten(3)
    codes = (low.unflatten(2, (2, 128)) | high << 4).flatten(1)
    factors = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = checked(f"{module}.weight", _half_at(blocks, 208)[..., None] * factors).flatten(1)
    return CodedWeight(scheme.name, signed(codes + 96), scales, 16)


def _blocks(files: StoredTensors, module: str, shape: tuple[int, int], layout: str) -> Tensor:
    """uint8 `[out, blocks, bytes]`."""
    _, num_inputs, num_bytes = GGUF_BLOCKS[layout]
    num_blocks = -(-shape[1] // num_inputs)
    rows = stored(files, f"{module}.weight", (shape[0], num_blocks * num_bytes))
    return rows.view(shape[0], num_blocks, num_bytes)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 `[out, blocks, ..., n]` -> `[out, blocks, ... * 2n]`: the lower halves along the last
    axis, then the upper ones."""
    return torch.cat((pairs & 0x0F, pairs >> 4), dim=-1).flatten(2)


def _half_at(blocks: Tensor, begin: int) -> Tensor:
    """float32 `[out, blocks]`, of two bytes of each."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0].float()


def _scales(blocks: Tensor, module: str) -> Tensor:
    """float16 `[out, blocks]`, the first two bytes of each."""
    return checked(f"{module}.weight", _half_at(blocks, 0).half())


def _factors(blocks: Tensor, module: str) -> tuple[Tensor, int, Tensor]:
    """(scales, inputs of a group, offsets) of `Q4_K` and `Q5_K`, float32 `[out, 8 * blocks]`.

    They are products of the block's two factors and integers of six bits. Of groups 0 to 3, the
    integers for scales are in the bytes 0 to 3 and those for offsets in the bytes 4 to 7; of groups
    4 to 7, the lower four bits are in the bytes 8 to 11, and the upper two above those of groups 0
    to 3.
    """
    first, second, both = blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, both & 0x0F | first >> 6 << 4), dim=2)
    offsets = torch.cat((second & 63, both >> 4 | second >> 6 << 4), dim=2)
    factors = _half_at(blocks, 0)[..., None] * scales, _half_at(blocks, 2)[..., None] * offsets
    own, minima = checked(f"{module}.weight", torch.stack(factors).flatten(2))
    return own, 32, minima


def _with_offsets(weight: CodedWeight) -> CodedWeight:
    """Weights with zero points that subtract the offsets in `zeros`. A group whose scale is zero
    has one value, and gets codes of zero, the offset as its scale, and the zero point 1."""
    assert weight.zeros is not None
    is_constant = weight.scales == 0
    scales = torch.where(is_constant, weight.zeros, weight.scales)
    zeros = torch.where(is_constant, 1.0, weight.zeros / weight.scales)
    codes = weight.codes.masked_fill(is_constant.repeat_interleave(32, 1), 0)
    return replace(weight, codes=codes, scales=scales, zeros=zeros)
