"""How the space of an adapter is divided."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.worker.types.extents import (
    MIN_PAGE_BYTES,
    Extents,
    count_most_blocks,
    count_pages_per_block,
    extent_begins,
    extent_lengths,
    extent_sizes,
)

PAGES_PER_BLOCK = st.sampled_from([1, 2, 8, 32])


def test_thirteen_pages_are_extents_of_eight_and_four_and_one():
    assert extent_sizes(13, 32) == [8, 4, 1]
    assert extent_sizes(64 + 13, 32) == [32, 32, 8, 4, 1]
    assert extent_begins(64 + 13, 32) == [0, 32, 64, 72, 76]
    assert count_most_blocks(64 + 13, 32) == 5


def test_pages_are_not_smaller_than_4_kib_and_begin_where_tiles_may():
    assert count_pages_per_block(2 << 20) == 32
    assert count_pages_per_block(16 << 10) == 4
    assert count_pages_per_block(64) == 1
    assert count_pages_per_block(32 * 64 * 65 + 64) == 1
    for num_lines in range(1, 5000, 7):
        pages = count_pages_per_block(num_lines * 64)
        assert num_lines % pages == 0
        assert pages == 1 or num_lines * 64 // pages >= MIN_PAGE_BYTES


@given(st.integers(0, 200), PAGES_PER_BLOCK)
def test_extents_are_parts_of_blocks_that_descend(num_pages: int, per_block: int):
    sizes = extent_sizes(num_pages, per_block)
    assert sum(sizes) == num_pages and sizes == sorted(sizes, reverse=True)
    assert all(per_block % size == 0 for size in sizes)
    assert len(sizes) == count_most_blocks(num_pages, per_block)


@given(st.integers(0, 200), st.integers(0, 200), PAGES_PER_BLOCK, st.randoms())
def test_a_smaller_image_lies_inside_the_extents_of_a_larger_one(one, other, per_block, rng):
    num_own, num_pages = sorted((one, other))
    sizes = extent_sizes(num_pages, per_block)
    blocks = rng.sample(range(1000), len(sizes))
    extents = Extents(num_pages, tuple(block * per_block for block in blocks))
    given = {
        p
        for first_page, n in zip(extents.first_pages, sizes, strict=True)
        for p in range(first_page, first_page + n)
    }
    own = extents.holding(num_own, per_block)
    own_sizes = extent_sizes(num_own, per_block)
    taken = [
        p
        for first_page, n in zip(own, own_sizes, strict=True)
        for p in range(first_page, first_page + n)
    ]
    assert len(taken) == len(set(taken)) == num_own and set(taken) <= given
    if num_own == num_pages:
        assert tuple(own) == extents.first_pages


@given(st.integers(1, 200), st.integers(1, 500), st.integers(0, 3))
def test_lengths_add_up_to_the_image(num_pages: int, num_lines: int, num_missing: int):
    block_bytes = 64 * num_lines
    page_bytes = block_bytes // count_pages_per_block(block_bytes)
    num_bytes = num_pages * page_bytes - 8 * num_missing
    lengths = extent_lengths(num_pages, num_bytes, block_bytes)
    assert sum(lengths) == num_bytes and min(lengths) >= 0
