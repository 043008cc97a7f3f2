"""Assigns the matrices of an adapter to positions in its blocks. Pure arithmetic.

Matrices are cut into tiles of at most 16 rows; rows longer than a block are cut into pieces of
columns first. A tile starts at a multiple of 64 bytes and never crosses a block, so an adapter
needs no two blocks next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TILE_ROWS = 16
TILE_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    """Shape of something to pack, row-major."""

    num_rows: int
    num_columns: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class TilePlace:
    """One tile: rows and columns of its matrix, and its bytes' place."""

    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    block: int
    """Index into the adapter's list of blocks."""
    offset_bytes: int
    """Offset from the block's start."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The tiles of each matrix, in the order given, and what they fill."""

    tiles: tuple[tuple[TilePlace, ...], ...]
    num_blocks: int
    num_bytes: int
    """Up to the end of the last tile."""


class TileLayout:
    """Packs matrices into blocks of `block_bytes`, in order, without gaps except for alignment."""

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes % TILE_ALIGN_BYTES == 0, block_bytes
        self._block_bytes = block_bytes

    def pack(self, matrices: Sequence[Matrix]) -> Packing:
        """Place every matrix; neighbours share blocks."""
        position = 0
        tiles = []
        for matrix in matrices:
            placed, position = self._place(matrix, position)
            tiles.append(placed)
        return Packing(tuple(tiles), -(-position // self._block_bytes), position)

    def _place(self, matrix: Matrix, position: int) -> tuple[tuple[TilePlace, ...], int]:
        """Tiles of one matrix from a byte position on, and the position after them."""
        tiles = []
        chunk = min(matrix.num_columns, self._block_bytes // matrix.itemsize)
        for col_begin in range(0, matrix.num_columns, chunk):
            col_end = min(col_begin + chunk, matrix.num_columns)
            row = 0
            while row < matrix.num_rows:
                row_bytes = (col_end - col_begin) * matrix.itemsize
                position, num_rows = self._fit(position, row_bytes, matrix.num_rows - row)
                block, offset = divmod(position, self._block_bytes)
                tiles.append(TilePlace(row, row + num_rows, col_begin, col_end, block, offset))
                row += num_rows
                position += num_rows * row_bytes
        return tuple(tiles), position

    def _fit(self, position: int, row_bytes: int, rows_left: int) -> tuple[int, int]:
        """The next aligned position with space for a row, and how many rows fit there."""
        position += -position % TILE_ALIGN_BYTES
        room = self._block_bytes - position % self._block_bytes
        if room < row_bytes:
            position += room
            room = self._block_bytes
        return position, min(rows_left, MAX_TILE_ROWS, room // row_bytes)
