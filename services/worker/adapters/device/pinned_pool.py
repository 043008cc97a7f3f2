"""Accounts for images in pinned host memory and the pages that they use.

Blocks and pages are as large as the arena's, so images of all sizes fill the pool with hardly any
gaps. An image is identified by its folder and the hash in its head. The least recently used image
is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from loraplex_services.worker.adapters.pack.image import ImageIndex
from loraplex_services.worker.cache.arena import Arena


@dataclass(frozen=True, slots=True)
class PinnedImage:
    """An image in the pool."""

    sha256: bytes
    index: ImageIndex
    first_pages: tuple[int, ...]
    """First page of each of its extents in the pool."""


class PinnedPool:
    """Images in a fixed number of blocks, at most one of each folder."""

    def __init__(self, num_blocks: int, pages_per_block: int) -> None:
        self._arena = Arena(num_blocks, pages_per_block)
        self._images: OrderedDict[Path, PinnedImage] = OrderedDict()
        self._left: dict[Path, None] = {}

    def __contains__(self, folder: Path) -> bool:
        return folder in self._images

    def find(self, folder: Path, sha256: bytes) -> PinnedImage | None:
        """An image, which is marked as just used; None if it is not here. Drops another image of
        the folder."""
        held = self._images.get(folder)
        if held is None:
            return None
        if held.sha256 != sha256:
            self.drop(folder)
            return None
        self._images.move_to_end(folder)
        return held

    def enter(self, folder: Path, sha256: bytes, index: ImageIndex) -> PinnedImage | None:
        """Take in a new image; None if it is larger than the pool. Evicts other images."""
        assert folder not in self._images, "the image is here"
        num_pages = index.num_pages
        if num_pages > self._arena.num_blocks * self._arena.pages_per_block:
            return None
        while self._arena.blocks_for(num_pages) > self._arena.num_free:
            self.drop(next(iter(self._images)))
        first_pages = self._arena.allocate_pages(str(folder), num_pages)
        self._images[folder] = PinnedImage(sha256, index, tuple(first_pages))
        self._left.pop(folder, None)
        return self._images[folder]

    def drop(self, folder: Path) -> None:
        """Forget the image of a folder."""
        image = self._images.pop(folder)
        self._arena.free_pages(str(folder), image.first_pages, image.index.num_pages)
        self._left[folder] = None

    def take_left(self) -> tuple[Path, ...]:
        """Folders whose images have left since the last call and are not back."""
        left, self._left = tuple(self._left), {}
        return left
