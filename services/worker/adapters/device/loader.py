"""Loads adapters into the arena concurrently with steps, on two threads of the engine process.

One thread copies images, without holding the GIL. The other packs adapters that need the base's
weights and that the API server process could therefore not pack.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapter_format.rope_scaling import parse
from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.adapters.device.table import AdapterTable
from loraplex_services.worker.adapters.pack.image import (
    Image,
    ImageBytes,
    ImageFile,
    ImageIndex,
    image_path,
)
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.types.extents import Extents, extent_lengths
from loraplex_services.worker.types.own_rope import own_ropes
from loraplex_services.worker.types.runner_protocol import Copied


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedImage(Copied):
    """An adapter that the loader copied."""

    index: ImageIndex
    first_pages: tuple[int, ...]
    """First page of each of its extents."""
    copy_events: CopyEvents | None = None
    """The copies that steps have to wait for; None = every byte is on the device."""
    copy_id: int = 0
    """Identifies the copy to the other tensor-parallel ranks, if there are any."""


class AdapterLoader:
    """Packs and copies the adapters of one runner, and enters them into the tables that steps read.

    `AdapterCache` decides which adapter gets which slot and extents.
    """

    def __init__(
        self,
        arena: ArenaBuffer,
        packer: Packer,
        ropes: Ropes,
        host: PinnedCache | None,
        executors: tuple[Executor, Executor] | None,
    ) -> None:
        """
        Args:
            ropes: of the model, with a row reserved for each slot.
            host: pinned memory that copies go through; None = they go straight from the page cache
                into the arena.
            executors: for copies and for packing, one thread each; None = threads of its own.
        """
        self.table = AdapterTable(arena)
        self.layout = packer.layout
        self._arena = arena
        self._packer = packer
        self._ropes = ropes
        self._host = host
        copying, packing = executors or (
            ThreadPoolExecutor(1, "copy adapters"),
            ThreadPoolExecutor(1, "pack adapters"),
        )
        self._copying, self._packing = copying, packing
        self._last_copy: Future[CopiedImage] | None = None

    @property
    def stall_s(self) -> float:
        """Seconds for which steps have waited for unfinished copies."""
        return 0.0 if self._host is None else self._host.stalls.total_s

    def pack(self, folder: Path) -> Future[int]:
        """Write the image of the adapter into its folder; the result is its number of pages."""
        return self._packing.submit(self._packer.write, folder)

    def copy(
        self, folder: Path, extents: Extents, step_s: float, content: ImageBytes | None = None
    ) -> Future[CopiedImage]:
        """Fill `extents`, which no step in flight reads, from the image in `folder`. A copy that
        ends within a step of `step_s` may stay under way: see `PinnedCache.copy`.

        Args:
            content: of the image's file, if the folder is on another machine.
        """
        self._last_copy = self._copying.submit(self._copy, folder, extents, step_s, content)
        return self._last_copy

    def await_copies(self, timeout_s: float) -> None:
        """Return when no copy is in progress, or after `timeout_s`."""
        if self._last_copy is not None:
            wait([self._last_copy], timeout_s)  # one thread: the others ended before it

    def enter(self, slot: int, copied: CopiedImage) -> None:
        """Enter what was copied under `slot`, which is not in use. On the engine's thread."""
        self.table.enter(slot, copied.index, copied.first_pages)
        if scaling := copied.facts.rope_scaling:
            self._ropes.enter(slot, own_ropes(self.layout.ropes, parse(scaling)))

    def unload(self, slot: int) -> None:
        """Take `slot` out of the tables; its pages may be reused at once."""
        self.table.remove(slot)
        self._ropes.remove(slot)

    def _copy(
        self, folder: Path, extents: Extents, step_s: float, content: ImageBytes | None
    ) -> CopiedImage:
        begin_s = time.perf_counter()
        with ImageFile(image_path(folder, self._packer.fingerprint), content) as image:
            index = image.index if self._host is None else self._host.index_of(folder, image)
            # Another rank's image may be larger.
            own = extents.holding(index.num_pages, self._arena.pages_per_block)
            copy_events, expected_s = self._fill(folder, image, own, step_s)
            ready_s = time.perf_counter() - begin_s
            # After the result: a later copy waits for this, but this one does not.
            last_byte = max(own, default=0) * self._arena.page_bytes
            self._copying.submit(self._arena.provide_after, last_byte)
            copied = CopiedImage(
                folder,
                index.num_bytes,
                index.facts,
                ready_s + expected_s,
                ready_s,
                index=index,
                first_pages=tuple(own),
                copy_events=copy_events,
            )
        if self._host is None:
            return copied
        return replace(copied, is_on_host=folder in self._host, left_host=self._host.take_left())

    def _fill(
        self, folder: Path, image: Image, first_pages: Sequence[int], step_s: float
    ) -> tuple[CopyEvents | None, float]:
        """Raises and returns as `PinnedCache.copy` does."""
        if self._host is not None:
            return self._host.copy(folder, image, first_pages, step_s)
        index = image.index
        lengths = extent_lengths(index.num_pages, index.num_bytes, self._arena.block_bytes)
        arena = self._arena.data.view(-1).numpy().data
        starts = [first_page * self._arena.page_bytes for first_page in first_pages]
        image.read_into([arena[s : s + n] for s, n in zip(starts, lengths, strict=True)])
        return None, 0.0
