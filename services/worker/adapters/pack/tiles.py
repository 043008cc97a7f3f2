"""Assigns the matrices of an adapter to positions in its extents. Pure arithmetic.

Matrices are cut into tiles of at most 16 rows; rows longer than a block are cut by columns first. A
tile starts at a multiple of 64 bytes and never crosses the end of an extent, so the extents of an
adapter need not be adjacent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loraplex_services.worker.types.extents import (
    count_pages_per_block,
    extent_begins,
    extent_sizes,
)

MAX_TILE_ROWS = 16
TILE_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    """Shape of something to pack, row-major."""

    num_rows: int
    num_columns: int
    itemsize: int


class ImageTile(NamedTuple):
    """Rows and columns of a matrix, and where their bytes are."""

    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    extent: int
    """Index into the adapter's list of extents."""
    offset_bytes: int
    """Offset from the extent's start."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The tiles of each matrix, in the order given, and what they fill."""

    tiles: tuple[tuple[ImageTile, ...], ...]
    num_pages: int
    num_bytes: int
    """Up to the end of the last tile, with the extents one behind the other."""


class TileLayout:
    """Packs matrices into extents without gaps except for alignment and for rows that would cross
    the end of an extent."""

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes % TILE_ALIGN_BYTES == 0, block_bytes
        self._block_bytes = block_bytes
        self._pages_per_block = count_pages_per_block(block_bytes)
        self._page_bytes = block_bytes // self._pages_per_block

    def pack(self, matrices: Sequence[Matrix]) -> Packing:
        """Assign all matrices to as few pages as hold them. Neighbours share extents."""
        blocks = _Blocks(self._block_bytes)
        tiles, ends = [], []
        for matrix in matrices:
            own = self._cut(matrix, blocks)
            assert own is not None, "blocks do not run out"
            tiles.append(own)
            ends.append(blocks.num_bytes)
        num_bytes = blocks.num_bytes
        num_blocks, rest = divmod(num_bytes, self._block_bytes)
        num_pages = num_blocks * self._pages_per_block + -(-rest // self._page_bytes)
        # The contents of complete blocks stay; only the rest is packed again.
        first = bisect_right(ends, num_blocks * self._block_bytes)
        while num_pages % self._pages_per_block:
            begin = ends[first - 1] if first else 0
            parts = _Parts(begin, num_pages, self._pages_per_block, self._page_bytes)
            if (packed := self._pack_into(matrices[first:], parts)) is not None:
                return Packing((*tiles[:first], *packed), num_pages, parts.num_bytes)
            num_pages += 1
        return Packing(tuple(tiles), num_pages, num_bytes)

    def _pack_into(
        self, matrices: Sequence[Matrix], parts: _Parts
    ) -> list[tuple[ImageTile, ...]] | None:
        """Tiles of each matrix; None if they do not fit. Those of long rows come first,
        and short rows fill the gaps."""
        tiles: dict[int, tuple[ImageTile, ...]] = {}
        for index in sorted(range(len(matrices)), key=lambda i: -_row_bytes(matrices[i])):
            own = self._cut(matrices[index], parts)
            if own is None:
                return None
            tiles[index] = own
        return [tiles[index] for index in range(len(matrices))]

    def _cut(self, matrix: Matrix, extents: _Blocks | _Parts) -> tuple[ImageTile, ...] | None:
        """Tiles of one matrix; None if they do not fit."""
        tiles = []
        chunk = min(matrix.num_columns, self._block_bytes // matrix.itemsize)
        for col_begin in range(0, matrix.num_columns, chunk):
            col_end = min(col_begin + chunk, matrix.num_columns)
            row = 0
            while row < matrix.num_rows:
                row_bytes = (col_end - col_begin) * matrix.itemsize
                extent = extents.with_space(row_bytes)
                if extent is None:
                    return None
                num_rows = min(matrix.num_rows - row, MAX_TILE_ROWS, extent.free_bytes // row_bytes)
                offset = extent.take(num_rows * row_bytes)
                rows = row, row + num_rows
                tiles.append(ImageTile(*rows, col_begin, col_end, extent.index, offset))
                row += num_rows
        return tuple(tiles)


@dataclass(slots=True)
class _Extent:
    """One extent that is being filled."""

    index: int
    begin: int
    """Byte offset of its start in the image."""
    size: int
    filled: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes from the next aligned position on."""
        return self.size - self._next

    def take(self, num_bytes: int) -> int:
        """Fill the next bytes, which must be free. Returns their offset."""
        offset = self._next
        self.filled = offset + num_bytes
        return offset

    @property
    def _next(self) -> int:
        return self.filled + -self.filled % TILE_ALIGN_BYTES


class _Blocks:
    """Any number of blocks, filled one after another."""

    def __init__(self, block_bytes: int) -> None:
        self._last = _Extent(0, 0, block_bytes)

    def with_space(self, num_bytes: int) -> _Extent:
        """The last block, or a new one."""
        if self._last.free_bytes < num_bytes:
            index, size = self._last.index + 1, self._last.size
            self._last = _Extent(index, index * size, size)
        return self._last

    @property
    def num_bytes(self) -> int:
        """Up to the end of what is filled."""
        return self._last.begin + self._last.filled


class _Parts:
    """The last extents of an image of `num_pages`, which are all open at once."""

    def __init__(self, begin: int, num_pages: int, pages_per_block: int, page_bytes: int) -> None:
        """`begin`: the byte before which everything is filled."""
        sizes = extent_sizes(num_pages, pages_per_block)
        begins = extent_begins(num_pages, pages_per_block)
        extents = [
            _Extent(index, page * page_bytes, size * page_bytes)
            for index, (page, size) in enumerate(zip(begins, sizes, strict=True))
        ]
        self._open = [extent for extent in extents if begin < extent.begin + extent.size]
        self._open[0].filled = begin - self._open[0].begin

    def with_space(self, num_bytes: int) -> _Extent | None:
        """The first extent with enough free bytes; None if there is none."""
        return next((extent for extent in self._open if extent.free_bytes >= num_bytes), None)

    @property
    def num_bytes(self) -> int:
        """Up to the end of what is filled."""
        return max(extent.begin + extent.filled for extent in self._open if extent.filled)


def _row_bytes(matrix: Matrix) -> int:
    return matrix.num_columns * matrix.itemsize
