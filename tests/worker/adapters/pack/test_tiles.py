"""Packing: tiles cover every matrix once, align, never cross an extent, never overlap."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.worker.adapters.pack.tiles import (
    MAX_TILE_ROWS,
    TILE_ALIGN_BYTES,
    Matrix,
    TileLayout,
)
from loraplex_services.worker.types.extents import (
    MIN_PAGE_BYTES,
    count_pages_per_block,
    extent_begins,
    extent_sizes,
)

matrices = st.lists(
    st.builds(Matrix, st.integers(1, 70), st.integers(1, 900), st.sampled_from([2, 4])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(matrices, st.one_of(st.integers(1, 40), st.sampled_from([128, 192, 256, 2048])))
def test_tiles_cover_each_matrix_once_and_stay_inside_extents(shapes, num_lines):
    block_bytes = num_lines * TILE_ALIGN_BYTES
    per_block = count_pages_per_block(block_bytes)
    page_bytes = block_bytes // per_block
    packing = TileLayout(block_bytes).pack(shapes)
    sizes = extent_sizes(packing.num_pages, per_block)
    begins = extent_begins(packing.num_pages, per_block)
    used: set[int] = set()
    for matrix, tiles in zip(shapes, packing.tiles, strict=True):
        times_covered = np.zeros((matrix.num_rows, matrix.num_columns), int)
        for tile in tiles:
            cells = times_covered[tile.row_begin : tile.row_end, tile.col_begin : tile.col_end]
            cells += 1
            num_bytes = cells.size * matrix.itemsize
            assert 1 <= tile.row_end - tile.row_begin <= MAX_TILE_ROWS
            assert tile.offset_bytes % TILE_ALIGN_BYTES == 0
            assert tile.offset_bytes + num_bytes <= sizes[tile.extent] * page_bytes
            begin = begins[tile.extent] * page_bytes + tile.offset_bytes
            lines = set(
                range(begin // TILE_ALIGN_BYTES, -(-(begin + num_bytes) // TILE_ALIGN_BYTES))
            )
            assert not lines & used
            used |= lines
        assert (times_covered == 1).all()
    last = (max(used) + 1) * TILE_ALIGN_BYTES
    assert last - TILE_ALIGN_BYTES < packing.num_bytes <= last <= packing.num_pages * page_bytes
    assert packing.num_pages < last // page_bytes + per_block + 1


@given(matrices)
def test_an_adapter_takes_no_more_pages_than_its_whole_blocks(shapes):
    """As if a block could not be shared: no layout of parts is worse than that."""
    block_bytes = 32 * MIN_PAGE_BYTES
    tiles = TileLayout(block_bytes).pack(shapes)
    assert tiles.num_pages <= -(-sum(_bytes_of(m) for m in shapes) // block_bytes) * 32


def _bytes_of(matrix: Matrix) -> int:
    """With all that alignment may add."""
    tiles = -(-matrix.num_rows // MAX_TILE_ROWS) + 1
    return matrix.num_rows * matrix.num_columns * matrix.itemsize + tiles * TILE_ALIGN_BYTES


def test_a_small_adapter_takes_a_part_of_a_block():
    packing = TileLayout(32 * MIN_PAGE_BYTES).pack([Matrix(1, 2048, 2)] * 13)
    assert packing.num_pages == 13
    assert [tiles[0].extent for tiles in packing.tiles] == [0] * 8 + [1] * 4 + [2]


def test_a_row_that_no_small_part_holds_takes_a_larger_one():
    packing = TileLayout(32 * MIN_PAGE_BYTES).pack([Matrix(3, 3072, 2)])
    assert packing.num_pages == 6, "in 5 pages, the third row would cross an extent's end"
    assert [tile.extent for tile in packing.tiles[0]] == [0, 1]


def test_small_matrices_share_a_block():
    packing = TileLayout(4096).pack([Matrix(4, 64, 4), Matrix(4, 64, 4)])
    assert packing.num_pages == 1
    assert packing.tiles[1][0].offset_bytes == 1024


def test_rows_longer_than_a_block_are_cut_into_columns():
    packing = TileLayout(256).pack([Matrix(2, 100, 4)])
    spans = [(t.row_begin, t.row_end, t.col_begin, t.col_end) for t in packing.tiles[0]]
    assert spans == [(0, 1, 0, 64), (1, 2, 0, 64), (0, 1, 64, 100), (1, 2, 64, 100)]
