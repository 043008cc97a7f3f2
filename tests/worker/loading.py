"""Loads adapters into a runner at once, without the engine.

They are packed in memory, so that nothing is written next to the adapter. Ranks that share a base
read each an image of their own, which has to lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.adapters.pack.image import ImageIndex
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.extents import Extents, extent_begins

HOST_CACHE_BYTES = 16 << 20
"""Pinned host memory of a runner on a GPU, whose machine runs several tests at a time."""


def blocks_of(runner: TorchRunner, num_pages: int) -> int:
    """Blocks that hold so many pages."""
    return -(-num_pages // runner.arena.pages_per_block)


def in_blocks(runner: TorchRunner, num_pages: int, blocks: Sequence[int]) -> Extents:
    """Extents from the start of `blocks` on."""
    size = runner.arena.pages_per_block
    begins = extent_begins(num_pages, size)
    return Extents(num_pages, tuple(blocks[b // size] * size + b % size for b in begins))


def taken(free: list[int], count: int) -> list[int]:
    """So many of the free blocks, which are free no longer."""
    return [free.pop() for _ in range(count)]


def adapter_blocks(runner: TorchRunner, folder: Path) -> int:
    """Blocks that the adapter in a folder needs."""
    return blocks_of(runner, adapter_pages(runner, folder))


def adapter_pages(runner: TorchRunner, folder: Path) -> int:
    """Pages that the adapter in a folder needs."""
    if runner._followers is not None:
        return runner.pack_adapter(folder).result()
    return runner._adapters._packer.pack(folder).index.num_pages


@torch.inference_mode()
def load_adapter(
    runner: TorchRunner, slot: int, folder: Path, take: Callable[[int], Sequence[int]]
) -> None:
    """Enter the adapter in a folder under `slot`, in the blocks that `take` gives when it is told
    how many they must be. Raises as packing does."""
    if runner._followers is not None:
        num_pages = adapter_pages(runner, folder)
        extents = in_blocks(runner, num_pages, take(blocks_of(runner, num_pages)))
        runner.enter_adapter(slot, runner.copy_adapter(folder, extents).result())
        return
    image = runner._adapters._packer.pack(folder)
    num_pages = image.index.num_pages
    _, first_pages = in_blocks(runner, num_pages, take(blocks_of(runner, num_pages)))
    runner._adapters._fill(folder, image, first_pages, 0.0)
    runner.enter_adapter(slot, copied_image(folder, image.index, first_pages))


def copied_image(
    folder: Path,
    index: ImageIndex,
    first_pages: Sequence[int],
    copy_events: CopyEvents | None = None,
) -> CopiedImage:
    """What the loader says of a copy that took no time."""
    facts = folder, index.num_bytes, index.facts, 0.0, 0.0
    pages = tuple(first_pages)
    return CopiedImage(*facts, index=index, first_pages=pages, copy_events=copy_events)
