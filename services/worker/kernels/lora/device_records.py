"""An adapter's entry at a site as rows of integers, which GPU kernels walk. No tensors are made.

Every record is `RECORD_WORDS` int64. Offsets are bytes from the arena's start; "first" and "number"
name other records of the same adapter, as indices that `DeviceTables` shifts to their place.

    entry  first band, number of bands, first strip, number of strips
    band   first rank row, number of rank rows (<= 64), first piece, number of pieces,
           address of the rank rows' float32 scales, which kernels of int8 matrices read
    piece  offset of the band's first row, first input, number of inputs, row stride in elements
    strip  first output, number of outputs, first tile, number of tiles, scale (float32 bits),
           offsets of gain, bias of B, bias delta (-1 = absent)
    tile   offset of the strip's first output in the tile's first row, first rank row,
           number of rank rows (<= 16), row stride in elements

Bands cut the stacked A `[rank, in]` into rows, strips cut B `[rank, out]` into columns: a shrink
program reads a part of one band, an expand program a part of one strip. Tiles that end inside of a
neighbour's rows or columns are cut there, so that bands and strips are rectangles.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

from services.worker.kernels.lora.tables import SiteDelta, Slice, Tile

RECORD_WORDS = 8
BAND_ROWS = 64
TILE_ROWS = 16
ABSENT = -1

Record = tuple[int, ...]


class RecordBuilder:
    """Collects the records of one adapter; `entries[site]` is the index of a site's entry."""

    def __init__(self, arena_address: int) -> None:
        self._arena_address = arena_address
        self.records: list[list[int]] = []
        self.links: list[tuple[int, int]] = []
        """(record, word) of every word that is an index of a record."""
        self.entries: dict[int, int] = {}

    def add_site(self, site_id: int, delta: SiteDelta) -> None:
        """Add what kernels can do for `delta`: matrices and vectors."""
        bands = [self._band(*rows, delta) for rows in _bands(delta)]
        strips = [self._strip(*columns, delta) for columns in _strips(delta)]
        first_band = self._append(bands, link=2)
        first_strip = self._append(strips, link=2)
        entry = (first_band, len(bands), first_strip, len(strips))
        self.entries[site_id] = self._append([entry], link=0)
        self.links.append((self.entries[site_id], 2))

    def _band(self, row_begin: int, row_end: int, delta: SiteDelta) -> Record:
        pieces = [
            (self._at(tile, row_begin, tile.col_begin), tile.col_begin, _width(tile), _width(tile))
            for tile in delta.a
            if tile.row_begin <= row_begin and row_end <= tile.row_end
        ]
        scales = delta.scales.data_ptr() + row_begin * delta.scales.itemsize
        return row_begin, row_end - row_begin, self._append(pieces), len(pieces), scales

    def _strip(self, col_begin: int, col_end: int, delta: SiteDelta) -> Record:
        tiles = []
        for tile in delta.b:
            if not (tile.col_begin <= col_begin and col_end <= tile.col_end):
                continue
            for row in range(tile.row_begin, tile.row_end, TILE_ROWS):
                num_rows = min(TILE_ROWS, tile.row_end - row)
                tiles.append((self._at(tile, row, col_begin), row, num_rows, _width(tile)))
        vectors = (self._vector(part, col_begin) for part in _vectors(delta))
        # Integers' scales are applied by shrink, row by row.
        scale = float_bits(1.0 if delta.is_int8 else _scale_of(delta.slices, col_begin))
        return col_begin, col_end - col_begin, self._append(tiles), len(tiles), scale, *vectors

    def _vector(self, tiles: Sequence[Tile], column: int) -> int:
        for tile in tiles:
            if tile.col_begin <= column < tile.col_end:
                return self._at(tile, tile.row_begin, column)
        return ABSENT

    def _at(self, tile: Tile, row: int, column: int) -> int:
        """Byte offset of one element."""
        index = (row - tile.row_begin) * _width(tile) + column - tile.col_begin
        return tile.data.data_ptr() - self._arena_address + index * tile.data.itemsize

    def _append(self, records: Iterable[Record], link: int | None = None) -> int:
        """Add records next to each other; `link` is their word that names a record."""
        first = len(self.records)
        for record in records:
            if link is not None:
                self.links.append((len(self.records), link))
            self.records.append([*record, *([0] * (RECORD_WORDS - len(record)))])
        return first


def _bands(delta: SiteDelta) -> list[tuple[int, int]]:
    """Rank rows [begin, end) of each band: cut where a slice or any tile is, and every 64 rows."""
    cuts = {part.rank_begin for part in delta.slices} | {delta.rank}
    for tile in delta.a:
        cuts |= {tile.row_begin, tile.row_end}
    return [
        (row, min(row + BAND_ROWS, end))
        for begin, end in pairwise(sorted(cuts))
        for row in range(begin, end, BAND_ROWS)
    ]


def _strips(delta: SiteDelta) -> list[tuple[int, int]]:
    """Outputs [begin, end) of each strip: everything that a matrix or a vector reaches, cut at
    their edges."""
    tiles = [*delta.b, *(tile for part in _vectors(delta) for tile in part)]
    cuts = sorted({edge for tile in tiles for edge in (tile.col_begin, tile.col_end)})
    return [
        (begin, end)
        for begin, end in pairwise(cuts)
        if any(tile.col_begin <= begin < tile.col_end for tile in tiles)
    ]


def _vectors(delta: SiteDelta) -> tuple[Sequence[Tile], ...]:
    return delta.gains, delta.lora_biases, delta.biases


def _width(tile: Tile) -> int:
    return tile.col_end - tile.col_begin


def _scale_of(slices: Sequence[Slice], column: int) -> float:
    for part in slices:
        if part.out_begin <= column < part.out_begin + part.out_len:
            return part.scale
    return 0.0


def float_bits(value: float) -> int:
    """A float32 as the int32 of the same bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
