"""Packing: tiles cover every matrix once, align, never cross a block, never overlap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.adapters.tiles import MAX_TILE_ROWS, TILE_ALIGN_BYTES, Matrix, TileLayout

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
        covered: set[tuple[int, int]] = set()
        for tile in tiles:
            rows = range(tile.row_begin, tile.row_end)
            columns = range(tile.col_begin, tile.col_end)
            num_bytes = len(rows) * len(columns) * matrix.itemsize
            assert 1 <= len(rows) <= MAX_TILE_ROWS
            assert tile.offset_bytes % TILE_ALIGN_BYTES == 0
            assert tile.offset_bytes + num_bytes <= block_bytes
            begin = tile.block * block_bytes + tile.offset_bytes
            lines = set(
                range(begin // TILE_ALIGN_BYTES, -(-(begin + num_bytes) // TILE_ALIGN_BYTES))
            )
            assert not lines & used
            used |= lines
            cells = {(row, column) for row in rows for column in columns}
            assert not cells & covered
            covered |= cells
        assert len(covered) == matrix.num_rows * matrix.num_columns
    assert packing.num_blocks == max(used) * TILE_ALIGN_BYTES // block_bytes + 1


def test_small_matrices_share_a_block():
    packing = TileLayout(4096).pack([Matrix(4, 64, 4), Matrix(4, 64, 4)])
    assert packing.num_blocks == 1
    assert packing.tiles[1][0].offset_bytes == 1024


def test_rows_longer_than_a_block_are_cut_into_columns():
    packing = TileLayout(256).pack([Matrix(2, 100, 4)])
    spans = [(t.row_begin, t.row_end, t.col_begin, t.col_end) for t in packing.tiles[0]]
    assert spans == [(0, 1, 0, 64), (1, 2, 0, 64), (0, 1, 64, 100), (1, 2, 64, 100)]
