"""Accounts for images in pinned host memory and the pages that they use.

Blocks and pages are as large as the arena's, so images of all sizes fill the pool with hardly any
gaps. An image is identified by the hash in its head, whatever folder it came from. The least
recently used image is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.types.extents import Extents


class PinnedPool:
    """Images in a fixed number of blocks."""

    def __init__(self, num_blocks: int, pages_per_block: int) -> None:
        self._arena = Arena(num_blocks, pages_per_block)
        self._images: OrderedDict[bytes, Extents] = OrderedDict()

    def find(self, sha256: bytes) -> Extents | None:
        """Where an image is, which is marked as just used; None if it is not here."""
        if sha256 not in self._images:
            return None
        self._images.move_to_end(sha256)
        return self._images[sha256]

    def enter(self, sha256: bytes, num_pages: int) -> Extents | None:
        """Extents for a new image; None if it is larger than the pool. Evicts other images."""
        assert sha256 not in self._images, "the image is here"
        if num_pages > self._arena.num_blocks * self._arena.pages_per_block:
            return None
        while self._arena.blocks_for(num_pages) > self._arena.num_free:
            self.drop(next(iter(self._images)))
        first_pages = self._arena.allocate_pages(sha256.hex(), num_pages)
        self._images[sha256] = Extents(num_pages, tuple(first_pages))
        return self._images[sha256]

    def drop(self, sha256: bytes) -> None:
        """Forget an image."""
        num_pages, first_pages = self._images.pop(sha256)
        self._arena.free_pages(sha256.hex(), first_pages, num_pages)
