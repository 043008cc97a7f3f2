"""Accounts for images in pinned host memory and the blocks that they use.

Blocks are as large as the arena's, so images of all sizes fill the pool without gaps. An image is
identified by the hash in its head, whatever folder it came from. The least recently used image is
evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loraplex_services.worker.cache.arena import Arena


class PinnedPool:
    """Images in a fixed number of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = Arena(num_blocks)
        self._images: OrderedDict[bytes, list[int]] = OrderedDict()

    def find(self, sha256: bytes) -> Sequence[int] | None:
        """The blocks of an image, in order, marked as just used; None if it is not here."""
        if sha256 not in self._images:
            return None
        self._images.move_to_end(sha256)
        return self._images[sha256]

    def enter(self, sha256: bytes, num_blocks: int) -> Sequence[int] | None:
        """Blocks for a new image, or None if it is larger than the pool. Evicts other images."""
        assert sha256 not in self._images, "the image is here"
        if num_blocks > self._blocks.num_blocks:
            return None
        while self._blocks.num_free < num_blocks:
            self.drop(next(iter(self._images)))
        self._images[sha256] = self._blocks.allocate(sha256.hex(), num_blocks)
        return self._images[sha256]

    def drop(self, sha256: bytes) -> None:
        """Forget an image."""
        self._blocks.free(sha256.hex(), self._images.pop(sha256))
