"""Divides the space of an adapter into extents. Pure arithmetic.

An adapter takes whole blocks and, for what is left, parts of blocks that it shares with other
adapters. A block has a power of two of *pages*. What is left is divided as its number of pages is
written in binary: 13 pages are extents of 8, 4 and 1. An extent never crosses a block, and one of n
pages begins at a multiple of n pages, so free extents merge with their buddies.

Source: the buddy system (Knowlton, 1965).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

MAX_PAGES_PER_BLOCK = 32
MIN_PAGE_BYTES = 4096
PAGE_ALIGN_BYTES = 64


def count_pages_per_block(block_bytes: int) -> int:
    """Number of pages of a block: the largest power of two with which a page has at least 4 KiB and
    begins where a tile may begin."""
    pages = MAX_PAGES_PER_BLOCK
    while pages > 1 and (
        block_bytes < pages * MIN_PAGE_BYTES or block_bytes % (pages * PAGE_ALIGN_BYTES)
    ):
        pages //= 2
    return pages


def paged_bytes(block_bytes: int) -> int:
    """The size of a block that is at least this large and has as many pages as its size allows."""
    most = min(MAX_PAGES_PER_BLOCK, max(1, block_bytes // MIN_PAGE_BYTES))
    num_pages = 1 << (most.bit_length() - 1)
    return block_bytes + -block_bytes % (num_pages * PAGE_ALIGN_BYTES)


def extent_sizes(num_pages: int, pages_per_block: int) -> list[int]:
    """Pages of each extent, whole blocks first, then descending."""
    whole, rest = divmod(num_pages, pages_per_block)
    bits = reversed(range(rest.bit_length()))
    return [pages_per_block] * whole + [1 << bit for bit in bits if rest >> bit & 1]


def count_most_blocks(num_pages: int, pages_per_block: int) -> int:
    """The number of blocks that the extents lie in if every part of a block lies in a different
    one."""
    return num_pages // pages_per_block + (num_pages % pages_per_block).bit_count()


def extent_begins(num_pages: int, pages_per_block: int) -> list[int]:
    """Number of pages before each extent, if the extents follow each other as in an image."""
    return [0, *accumulate(extent_sizes(num_pages, pages_per_block))][:-1]


def extent_lengths(num_pages: int, num_bytes: int, block_bytes: int) -> list[int]:
    """Bytes that an image of `num_bytes` has in each of its extents."""
    pages_per_block = count_pages_per_block(block_bytes)
    page_bytes = block_bytes // pages_per_block
    sizes = extent_sizes(num_pages, pages_per_block)
    begins = extent_begins(num_pages, pages_per_block)
    return [
        max(0, min(size * page_bytes, num_bytes - begin * page_bytes))
        for size, begin in zip(sizes, begins, strict=True)
    ]


class Extents(NamedTuple):
    """Where an adapter is in an arena."""

    num_pages: int
    first_pages: tuple[int, ...]
    """First page of each extent; `extent_sizes` has their sizes."""

    def holding(self, num_pages: int, pages_per_block: int) -> list[int]:
        """The first pages of the extents of another image that is put here and is not larger: the
        images of one adapter differ between tensor-parallel ranks.

        Sizes descend. From the first one that differs on, the extents of the smaller image are
        together smaller than the extent in that place, so each of them lies within one extent.
        """
        assert num_pages <= self.num_pages, (num_pages, self.num_pages)
        begins = extent_begins(self.num_pages, pages_per_block)
        own_begins = extent_begins(num_pages, pages_per_block)
        holders = [bisect_right(begins, begin) - 1 for begin in own_begins]
        return [
            self.first_pages[holder] + begin - begins[holder]
            for holder, begin in zip(holders, own_begins, strict=True)
        ]
