"""Loads adapters into the arena concurrently with steps, on two threads of the engine process.

One thread copies images, without holding the GIL. The other packs adapters that need the base's
weights and that the API server process could therefore not pack.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.weights import AdapterWeights
from loraplex_services.worker.adapters.pack.image import (
    ImageFile,
    ImageIndex,
    image_path,
)
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.extents import Extents


@dataclass(frozen=True, slots=True)
class CopiedImage:
    """Implements `runner_protocol.Copied`."""

    path: Path
    index: ImageIndex
    first_pages: tuple[int, ...]
    """First page of each of its extents."""
    elapsed_s: float
    copy_events: CopyEvents | None = None
    """What steps have to wait for; None = every byte is on the device."""
    copy_id: int = 0
    """Names it to the other tensor-parallel ranks, if there are any."""

    @property
    def facts(self) -> AdapterFacts:
        """What requests must know."""
        return self.index.facts

    @property
    def num_bytes(self) -> int:
        """That it fills."""
        return self.index.num_bytes


class AtOnce(Executor):
    """Runs tasks synchronously, for tools and for tests of the order of events."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]  # as inherited
        """A future that is done."""
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class AdapterLoader:
    """Packs, copies and enters the adapters of one runner."""

    def __init__(
        self, weights: AdapterWeights, packer: Packer, executors: tuple[Executor, Executor] | None
    ) -> None:
        """`executors`: for copies and for packing, one thread each; None = threads of its own."""
        self.weights = weights
        self._packer = packer
        copying, packing = executors or (
            ThreadPoolExecutor(1, "copy adapters"),
            ThreadPoolExecutor(1, "pack adapters"),
        )
        self._copying, self._packing = copying, packing
        self._last_copy: Future[CopiedImage] | None = None

    def pack(self, folder: Path) -> Future[int]:
        """Put the image of the adapter next to it; the result is its number of pages."""
        return self._packing.submit(self._pack, folder)

    def copy(self, folder: Path, extents: Extents, step_s: float) -> Future[CopiedImage]:
        """Fill `extents` from the image in `folder`; see `PinnedCache.copy`."""
        self._last_copy = self._copying.submit(self._copy, folder, extents, step_s)
        return self._last_copy

    def await_copies(self, timeout_s: float) -> None:
        """Return when no copy is in progress, or after `timeout_s`."""
        if self._last_copy is not None:
            wait([self._last_copy], timeout_s)  # one thread: the others ended before it

    def enter(self, slot: int, copied: CopiedImage) -> None:
        """Enter what was copied under `slot`, which is not in use. On the engine's thread."""
        self.weights.enter(slot, copied.index, copied.first_pages)

    def _pack(self, folder: Path) -> int:
        return self._packer.write(folder)

    def _copy(self, folder: Path, extents: Extents, step_s: float) -> CopiedImage:
        begin_s = time.perf_counter()
        with ImageFile(image_path(folder, self._packer.fingerprint)) as image:
            # Another rank's image may be larger.
            own = extents.holding(image.index.num_pages, self.weights.pages_per_block)
            copy_events, expected_s = self.weights.copy(image, own, step_s)
            elapsed_s = time.perf_counter() - begin_s + expected_s
            return CopiedImage(folder, image.index, tuple(own), elapsed_s, copy_events)
