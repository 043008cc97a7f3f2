"""Codes in units of 16 bits, the order in which the Triton programs read them.

A block of inputs is divided into as many lanes as a unit has codes. Unit k of a block holds the
k-th code of each lane, so that a program decodes a lane of neighbouring units with a few operations
on integers, and multiplies the result by neighbouring inputs.

    int4    lane l: bits 4l to 4l + 3
    int8    lane l: bits 8l to 8l + 7
    fp8     lane 0: its sign in bit 15, the rest in bits 10 to 4, where bfloat16 has sign, the last
            bits of the exponent and the first of the mantissa
            lane 1: its sign in bit 11, its next three bits in 14 to 12, its last four in 3 to 0, so
            that shifts by four move them to where those of lane 0 are
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = {"fp8": 2, "int8": 2, "int4": 4}
"""Codes in a unit, by kind."""
CHUNK_ROWS = 4096


def packed(codes: Tensor, kind: str, lane_inputs: int) -> Tensor:
    """int16 `[out, blocks * lane_inputs]`; zeros come after the last input.

    Args:
        codes: uint8 `[out, in]`.
        lane_inputs: inputs of a block in one lane.
    """
    lanes = LANES[kind]
    num_units = -(-codes.shape[1] // (lanes * lane_inputs)) * lane_inputs
    units = torch.zeros(len(codes), num_units, dtype=torch.int16, device=codes.device)
    for begin in range(0, len(codes), CHUNK_ROWS):  # some arrays of wide integers at once
        rows = codes[begin : begin + CHUNK_ROWS]
        padded = F.pad(rows, (0, num_units * lanes - rows.shape[1])).int()
        by_lane = padded.view(len(rows), -1, lanes, lane_inputs).unbind(2)
        words = torch.zeros_like(by_lane[0])
        for lane, own in enumerate(by_lane):
            words |= _moved(own, kind, lane)
        units[begin : begin + CHUNK_ROWS] = words.to(torch.int16).flatten(1)
    return units


def unpacked(units: Tensor, kind: str, lane_inputs: int) -> Tensor:
    """uint8 `[rows, in]`, with the padding after the last input."""
    words = units.int().view(len(units), units.shape[1] // lane_inputs, lane_inputs)
    lanes = [_moved_back(words, kind, lane) for lane in range(LANES[kind])]
    return torch.stack(lanes, dim=2).flatten(1).to(torch.uint8)


def _moved(codes: Tensor, kind: str, lane: int) -> Tensor:
    """Codes where a unit has those of a lane."""
    if kind != "fp8":
        return codes << (lane * 16 // LANES[kind])
    if lane == 0:
        return (codes & 0x80) << 8 | (codes & 0x7F) << 4
    return (codes & 0x80) << 4 | (codes & 0x70) << 8 | (codes & 0x0F)


def _moved_back(words: Tensor, kind: str, lane: int) -> Tensor:
    """The inverse."""
    if kind != "fp8":
        bits = 16 // LANES[kind]
        return words >> (lane * bits) & ((1 << bits) - 1)
    if lane == 0:
        return words >> 8 & 0x80 | words >> 4 & 0x7F
    return words >> 4 & 0x80 | words >> 8 & 0x70 | words & 0x0F


def _asm(*lines: str) -> str:
    return "{ .reg .b32 a, b, c, m, k; " + " ".join(f"{line};" for line in lines) + " }"


_FP8 = "mov.b32 k, 0x7b807b80", "mov.b32 c, 0x80008000"  # 2^120, -0
_INTEGERS = "mov.b32 k, 0x3f803f80", "mov.b32 c, 0x43004300"  # 1, 128
_PRODUCT = "fma.rn.bf16x2 $0, a, k, c"


def _int8_pairs(shift: int) -> str:
    """(128 + last seven bits) - (128 + first bit as 128)."""
    return _asm(
        *_INTEGERS,
        f"shr.b32 m, $1, {shift}",
        "mov.b32 b, 0x007f007f",
        "lop3.b32 a, m, b, c, 0xea",  # m & b | c
        "mov.b32 b, 0x00800080",
        "mov.b32 c, 0xc300c300",
        "lop3.b32 c, m, b, c, 0xea",
        _PRODUCT,
    )


def _int4_pairs(shift: int) -> str:
    """(128 + four bits) - 136."""
    return _asm(
        *_INTEGERS,
        f"shr.b32 m, $1, {shift}",
        "mov.b32 b, 0x000f000f",
        "lop3.b32 a, m, b, c, 0xea",
        "mov.b32 c, 0xc308c308",
        _PRODUCT,
    )


PAIRS = {
    "fp8": (
        _asm(*_FP8, "and.b32 a, $1, 0x87f087f0", _PRODUCT),
        _asm(
            *_FP8,
            "shr.b32 a, $1, 4",
            "shl.b32 b, $1, 4",
            "and.b32 a, a, 0x07000700",
            "mov.b32 m, 0x80f080f0",
            "lop3.b32 a, b, m, a, 0xea",
            _PRODUCT,
        ),
    ),
    "int8": tuple(_int8_pairs(8 * lane) for lane in range(2)),
    "int4": tuple(_int4_pairs(4 * lane) for lane in range(4)),
}
"""Instructions that decode a lane of two neighbouring units, `$1`, to two numbers in bfloat16,
`$0`. Left to itself, the compiler decodes every number alone, which takes twice as many."""
