"""Encodes an adapter as rows of integers that GPU kernels read. No torch.

A part of a site is what one module adds to: outputs [begin, begin + length) of a site. Every record
is `RECORD_WORDS` int64. Two numbers in a word are the low and the high 32 bits.

    group   A_WORD        first element of A's rows
            B_WORD        element of B's first row that stands for the part's output 0
            STRIDES_WORD  row strides of A and B
            INPUTS_WORD   inputs [begin, end) of A's rows
            OUTPUTS_WORD  outputs [begin, end) of B's rows, counted from the part's begin
            SIZE_WORD     number of rank rows (<= 16) and scale (float32 bits)
            SCALES_WORD   address of the rank rows' float32 scales, if matrices are int8
    vector  COLUMNS_WORD  outputs [begin, end)
            GAIN_WORD, LORA_BIAS_WORD, BIAS_WORD
                          elements of gain, bias of B and bias delta that stand for the part's
                          output 0, or ABSENT

Elements count from the arena's start, in the adapters' dtype, for vectors in float32. A group is a
rectangle of both matrices: where tiles are cut, groups are.

Records are made once, when an adapter is packed, with positions relative to the blocks of its
image. Entering the adapter adds the positions of the blocks in the arena, in one pass of numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loraplex_services.worker.types.sites import Slice

RECORD_WORDS = 8
RECORD_BYTES = 8 * RECORD_WORDS
INDEX_WORDS = 4
RELOCATION_WORDS = 3
GROUP_ROWS = 16
MAX_PARTS = 4
"""Most parts of a site in one launch."""
ABSENT = -(1 << 62)
A_WORD, B_WORD, STRIDES_WORD, INPUTS_WORD, OUTPUTS_WORD, SIZE_WORD, SCALES_WORD = range(7)
COLUMNS_WORD, GAIN_WORD, LORA_BIAS_WORD, BIAS_WORD = range(1, 5)
FLOAT32_BYTES = 4

Record = list[int]
Relocation = tuple[int, int, int]
"""A word of a record, the block that it counts from, bytes of an element."""


@dataclass(frozen=True, slots=True)
class OutputRange:
    """Outputs [begin, begin + length) of a site, which one module adds to."""

    site_id: int
    begin: int
    length: int

    @property
    def end(self) -> int:
        """One after its last output."""
        return self.begin + self.length


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows and columns of a site's matrix that lie row by row in one block."""

    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    block: int
    offset_bytes: int
    """Offset of its first element from the block's start."""
    itemsize: int
    """Bytes of an element."""

    @property
    def width(self) -> int:
        """Columns, which is the row stride too."""
        return self.col_end - self.col_begin

    def element(self, row: int, column: int) -> int:
        """An element, counted from the block's start; negative if there is no such element."""
        first = self.offset_bytes // self.itemsize
        return first + (row - self.row_begin) * self.width + column - self.col_begin


@dataclass(frozen=True, slots=True)
class SiteMatrices:
    """The content of the records of one adapter at one site."""

    slices: Sequence[Slice]
    a: Sequence[Rectangle]
    b: Sequence[Rectangle]
    gains: Sequence[Rectangle] = ()
    lora_biases: Sequence[Rectangle] = ()
    biases: Sequence[Rectangle] = ()
    scales: Sequence[float] = ()
    """Scales of int8 rank rows, multiplied by those of the slices; empty for other types."""


@dataclass(frozen=True, slots=True)
class AdapterRecords:
    """The records of one adapter."""

    sites: frozenset[int]
    """Site ids that they describe."""
    index: NDArray[np.int32]
    """`[parts, INDEX_WORDS]`: first group, number of groups, first vector, number of vectors."""
    data: NDArray[np.int64]
    """`[records, RECORD_WORDS]`, then the scales of int8 rank rows, float32. Word `SCALES_WORD` is
    a number of bytes from the start of `data`, 0 = none."""
    relocations: NDArray[np.int32]
    """`[words, RELOCATION_WORDS]`: words of `data` that count from a block, the block, and the
    bytes of an element."""

    def relocated(self, starts: Sequence[int], address: int) -> NDArray[np.int64]:
        """`data` with elements counted from the arena's start, and addresses of scales.

        Args:
            starts: byte offset in the arena of each block.
            address: where the data will lie on the device.
        """
        data = self.data.copy()
        words, blocks, itemsizes = self.relocations.T
        data.reshape(-1)[words] += np.asarray(starts, np.int64)[blocks] // itemsizes
        scales = data[: self.num_records, SCALES_WORD]
        scales[scales != 0] += address
        return data

    @property
    def num_records(self) -> int:
        """How many rows of `data` are records."""
        return int(self.index[:, (1, 3)].sum())


class RecordBuilder:
    """Collects the records of one adapter."""

    def __init__(self, parts: Sequence[OutputRange]) -> None:
        """`parts`: of all sites, in the order of the index."""
        self._parts: dict[int, list[tuple[int, OutputRange]]] = {}
        for i, part in enumerate(parts):
            self._parts.setdefault(part.site_id, []).append((i, part))
        self._index = np.zeros((len(parts), INDEX_WORDS), np.int32)
        self._records: list[Record] = []
        self._relocations: list[Relocation] = []
        self._scales: list[float] = []
        self._sites: set[int] = set()

    def add_site(self, site_id: int, site: SiteMatrices) -> None:
        """Append the groups and vectors of all parts of one site."""
        self._sites.add(site_id)
        for i, part in self._parts.get(site_id, ()):
            first = len(self._records)
            for band in site.slices:
                if band.out_begin < part.end and part.begin < band.out_begin + band.out_len:
                    self._add_groups(site, band, part)
            end_group = len(self._records)
            self._add_vectors(site, part)
            num_vectors = len(self._records) - end_group
            self._index[i] = first, end_group - first, end_group, num_vectors
        self._scales += site.scales

    def build(self) -> AdapterRecords:
        """All records, with the scales after them."""
        num_records = len(self._records)
        num_blank = -(-len(self._scales) * FLOAT32_BYTES // RECORD_BYTES)
        data = np.zeros((num_records + num_blank, RECORD_WORDS), np.int64)
        if self._records:
            data[:num_records] = self._records
        groups = data[:num_records, SCALES_WORD]
        groups[groups != 0] += num_records * RECORD_BYTES - FLOAT32_BYTES
        data[num_records:].reshape(-1).view(np.float32)[: len(self._scales)] = self._scales
        relocations = np.array(self._relocations, np.int32).reshape(-1, RELOCATION_WORDS)
        return AdapterRecords(frozenset(self._sites), self._index, data, relocations)

    def _add_groups(self, site: SiteMatrices, band: Slice, part: OutputRange) -> None:
        """Rank rows of a slice that lie in one tile of A and one of B, 16 at a time."""
        first, last = band.rank_begin, band.rank_begin + band.rank_len
        a_tiles = [tile for tile in site.a if tile.row_begin < last and first < tile.row_end]
        b_tiles = [
            tile
            for tile in site.b
            if tile.row_begin < last
            and first < tile.row_end
            and tile.col_begin < part.end
            and part.begin < tile.col_end
        ]
        for a in a_tiles:
            for b in b_tiles:
                begin = max(first, a.row_begin, b.row_begin)
                end = min(last, a.row_end, b.row_end)
                for row in range(begin, end, GROUP_ROWS):
                    rows = row, min(row + GROUP_ROWS, end)
                    self._add_group(rows, a, b, part, site, band.scale)

    def _add_group(
        self,
        rows: tuple[int, int],
        a: Rectangle,
        b: Rectangle,
        part: OutputRange,
        site: SiteMatrices,
        scale: float,
    ) -> None:
        begin, end = rows
        self._relocate(A_WORD, a)
        self._relocate(B_WORD, b)
        out_begin, out_end = max(b.col_begin, part.begin), min(b.col_end, part.end)
        # Until their start is known, scales are counted from 1: 0 = none.
        scales = (len(self._scales) + begin + 1) * FLOAT32_BYTES if site.scales else 0
        self._records.append(
            [
                a.element(begin, a.col_begin),
                b.element(begin, part.begin),
                _pair(a.width, b.width),
                _pair(a.col_begin, a.col_end),
                _pair(out_begin - part.begin, out_end - part.begin),
                _pair(end - begin, float_bits(1.0 if site.scales else scale)),
                scales,
                0,
            ]
        )

    def _add_vectors(self, site: SiteMatrices, part: OutputRange) -> None:
        kinds = site.gains, site.lora_biases, site.biases
        cuts = {part.begin, part.end} | {
            edge for tiles in kinds for tile in tiles for edge in (tile.col_begin, tile.col_end)
        }
        for begin, end in pairwise(sorted(cut for cut in cuts if part.begin <= cut <= part.end)):
            found = [
                next((t for t in tiles if t.col_begin <= begin and end <= t.col_end), None)
                for tiles in kinds
            ]
            if not any(found):
                continue
            elements = []
            for word, tile in zip((GAIN_WORD, LORA_BIAS_WORD, BIAS_WORD), found, strict=True):
                if tile is not None:
                    self._relocate(word, tile)
                elements.append(ABSENT if tile is None else tile.element(0, part.begin))
            outputs = _pair(begin - part.begin, end - part.begin)
            self._records.append([0, outputs, *elements, 0, 0, 0])

    def _relocate(self, word: int, tile: Rectangle) -> None:
        """Note that a word of the next record counts from the start of a tile's block."""
        flat = len(self._records) * RECORD_WORDS + word
        self._relocations.append((flat, tile.block, tile.itemsize))


def _pair(low: int, high: int) -> int:
    """Two numbers in one word; of `high` the bits count, so it may be negative."""
    return low | (high << 32)


def float_bits(value: float) -> int:
    """A float32 as the int32 of the same bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
