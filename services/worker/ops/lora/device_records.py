"""An adapter's update of one part of a site as rows of integers, which GPU kernels walk.

A part is what one module adds to: outputs [begin, begin + length) of a site. Every record is
`RECORD_WORDS` int64. Two numbers in a word are the low and the high 32 bits.

    group   first element of A's rows; element of B's first row that stands for the part's output 0;
            row strides of A and B; inputs [begin, end) of A's rows; outputs [begin, end) of B's
            rows, counted from the part's begin; number of rank rows (<= 16) and scale (float32
            bits); address of the rank rows' float32 scales, which kernels of int8 matrices read
    vector  0; outputs [begin, end); elements of gain, bias of B and bias delta that stand for
            the part's output 0, or ABSENT

Elements count from the arena's start, in the adapters' dtype, for vectors in float32. A group
is a rectangle of both matrices: where tiles are cut, groups are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.worker.ops.lora.tables import SiteDelta, Slice, Tile

RECORD_WORDS = 8
GROUP_ROWS = 16
ABSENT = -(1 << 62)

Record = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs [begin, begin + length) of a site, which one module adds to."""

    site_id: int
    begin: int
    length: int

    @property
    def end(self) -> int:
        """One after its last output."""
        return self.begin + self.length


@dataclass(frozen=True, slots=True)
class PartRecords:
    """What an adapter does to one part."""

    groups: list[Record]
    vectors: list[Record]


def part_records(delta: SiteDelta, part: Part, arena_address: int) -> PartRecords:
    """Records of what kernels can do for `delta` at one part: matrices and vectors.

    Args:
        arena_address: of its first byte; the tiles of `delta` are views of it.
    """
    groups = [
        _group(delta, rows, a, b, part, arena_address)
        for piece in delta.slices
        if piece.out_begin < part.end and part.begin < piece.out_begin + piece.out_len
        for rows, a, b in _rectangles(delta, piece, part)
    ]
    return PartRecords(groups, _vectors(delta, part, arena_address))


def _rectangles(
    delta: SiteDelta, piece: Slice, part: Part
) -> list[tuple[tuple[int, int], Tile, Tile]]:
    """Rank rows [begin, end) of a slice that lie in one tile of A and one of B, with these."""
    first, last = piece.rank_begin, piece.rank_begin + piece.rank_len
    a_tiles = [tile for tile in delta.a if tile.row_begin < last and first < tile.row_end]
    b_tiles = [
        tile
        for tile in delta.b
        if tile.row_begin < last
        and first < tile.row_end
        and tile.col_begin < part.end
        and part.begin < tile.col_end
    ]
    found = []
    for a in a_tiles:
        for b in b_tiles:
            begin = max(first, a.row_begin, b.row_begin)
            end = min(last, a.row_end, b.row_end)
            for row in range(begin, end, GROUP_ROWS):
                found.append(((row, min(row + GROUP_ROWS, end)), a, b))
    return found


def _group(
    delta: SiteDelta, rows: tuple[int, int], a: Tile, b: Tile, part: Part, arena_address: int
) -> Record:
    begin, end = rows
    a_begin = _element(a, arena_address) + (begin - a.row_begin) * _width(a)
    b_begin = _element(b, arena_address) + (begin - b.row_begin) * _width(b)
    out_begin, out_end = max(b.col_begin, part.begin), min(b.col_end, part.end)
    scale = 1.0 if delta.is_int8 else _scale_of(delta.slices, begin)
    return (
        a_begin,
        b_begin + part.begin - b.col_begin,
        _pair(_width(a), _width(b)),
        _pair(a.col_begin, a.col_end),
        _pair(out_begin - part.begin, out_end - part.begin),
        _pair(end - begin, float_bits(scale)),
        delta.scales.data_ptr() + begin * delta.scales.itemsize,
        0,
    )


def _vectors(delta: SiteDelta, part: Part, arena_address: int) -> list[Record]:
    kinds = delta.gains, delta.lora_biases, delta.biases
    cuts = {part.begin, part.end} | {
        edge for tiles in kinds for tile in tiles for edge in (tile.col_begin, tile.col_end)
    }
    records = []
    for begin, end in pairwise(sorted(cut for cut in cuts if part.begin <= cut <= part.end)):
        found = [
            next((t for t in tiles if t.col_begin <= begin and end <= t.col_end), None)
            for tiles in kinds
        ]
        if any(found):
            places = (
                ABSENT
                if tile is None
                else _element(tile, arena_address) + part.begin - tile.col_begin
                for tile in found
            )
            records.append((0, _pair(begin - part.begin, end - part.begin), *places, 0, 0, 0))
    return records


def _element(tile: Tile, arena_address: int) -> int:
    """Its first element, counted from the arena's start in its own dtype."""
    offset, rest = divmod(tile.data.data_ptr() - arena_address, tile.data.itemsize)
    assert rest == 0, (tile.data.data_ptr(), arena_address)
    return offset


def _width(tile: Tile) -> int:
    return tile.col_end - tile.col_begin


def _scale_of(slices: Sequence[Slice], rank_row: int) -> float:
    for part in slices:
        if part.rank_begin <= rank_row < part.rank_begin + part.rank_len:
            return part.scale
    return 0.0


def _pair(low: int, high: int) -> int:
    """Two numbers in one word; of `high` the bits count, so it may be negative."""
    return low | (high << 32)


def float_bits(value: float) -> int:
    """A float32 as the int32 of the same bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
