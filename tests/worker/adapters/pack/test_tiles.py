"""Packing: tiles cover every matrix once, align, never cross a block, never overlap."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.worker.adapters.pack.tiles import (
    MAX_TILE_ROWS,
    TILE_ALIGN_BYTES,
    Matrix,
    TileLayout,
)

matrices = st.lists(
    st.builds(Matrix, st.integers(1, 70), st.integers(1, 900), st.sampled_from([2, 4])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(matrices, st.integers(1, 40))
def test_tiles_cover_each_matrix_once_and_stay_inside_blocks(shapes, num_lines):
    block_bytes = num_lines * TILE_ALIGN_BYTES
    packing = TileLayout(block_bytes).pack(shapes)
    used: set[int] = set()
    for matrix, tiles in zip(shapes, packing.tiles, strict=True):
        times_covered = np.zeros((matrix.num_rows, matrix.num_columns), int)
        for tile in tiles:
            cells = times_covered[tile.row_begin : tile.row_end, tile.col_begin : tile.col_end]
            cells += 1
            num_bytes = cells.size * matrix.itemsize
            assert 1 <= tile.row_end - tile.row_begin <= MAX_TILE_ROWS
            assert tile.offset_bytes % TILE_ALIGN_BYTES == 0
            assert tile.offset_bytes + num_bytes <= block_bytes
            begin = tile.block * block_bytes + tile.offset_bytes
            lines = set(
                range(begin // TILE_ALIGN_BYTES, -(-(begin + num_bytes) // TILE_ALIGN_BYTES))
            )
            assert not lines & used
            used |= lines
        assert (times_covered == 1).all()
    assert packing.num_blocks == max(used) * TILE_ALIGN_BYTES // block_bytes + 1


def test_small_matrices_share_a_block():
    packing = TileLayout(4096).pack([Matrix(4, 64, 4), Matrix(4, 64, 4)])
    assert packing.num_blocks == 1
    assert packing.tiles[1][0].offset_bytes == 1024


def test_rows_longer_than_a_block_are_cut_into_columns():
    packing = TileLayout(256).pack([Matrix(2, 100, 4)])
    spans = [(t.row_begin, t.row_end, t.col_begin, t.col_end) for t in packing.tiles[0]]
    assert spans == [(0, 1, 0, 64), (1, 2, 0, 64), (0, 1, 64, 100), (1, 2, 64, 100)]
