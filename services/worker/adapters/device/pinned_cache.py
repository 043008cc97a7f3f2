"""Images in pinned host memory, between the disk cache and the arena of a GPU.

    image file --read once--> pinned memory --copied by the GPU--> extents of the arena

One thread copies while steps run. Several others read parts of an image for it, and the GPU copies
each part as soon as it has been read. Without a GPU, the same code copies at once, for tests.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.adapters.device.copy_events import CopyEvents, StallTimer
from loraplex_services.worker.adapters.device.pinned_pool import PinnedPool
from loraplex_services.worker.adapters.pack.image import Image, ImageIndex
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.cores import usable_cores
from loraplex_services.worker.native.pages import huge_pages
from loraplex_services.worker.types.extents import extent_lengths

CHUNK_BYTES = 8 << 20
"""Bytes that one thread reads at a time, that are copied to the device together, and that are
followed by an event. Smaller chunks arrive a little sooner, but each takes the GIL from the
engine's thread a few times."""
MAX_READERS = 12
"""The most threads that read one image. One thread reads 84 MB from the page cache in 16 ms next to
an H200, eight in 3.2 and twelve in 2.7 ms. The GPU copies as many bytes in 1.6 ms."""


class CopyChunk(NamedTuple):
    """Bytes of an image that are adjacent in pinned memory and in the arena as well."""

    begin: int
    """Offset in the image."""
    source: int
    """Offset in pinned memory."""
    target: int
    """Offset in the arena."""
    num_bytes: int


def cut(lengths: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> list[CopyChunk]:
    """Chunks of at most CHUNK_BYTES, in order.

    Args:
        lengths, sources, targets: bytes of each extent, and its offsets.
    """
    chunks: list[CopyChunk] = []
    begin = 0
    for num_bytes, source, target in zip(lengths, sources, targets, strict=True):
        end = begin + num_bytes
        if chunks:
            _, last_source, last_target, length = chunks[-1]
            if last_source + length == source and last_target + length == target:
                begin, source, target, _ = chunks.pop()
        while begin < end:
            chunk = CopyChunk(begin, source, target, min(CHUNK_BYTES, end - begin))
            chunks.append(chunk)
            begin, source, target = (offset + chunk.num_bytes for offset in chunk[:3])
    return chunks


class CopyForecast:
    """Predicts when copies will end, from the rate of earlier ones. Pure arithmetic."""

    def __init__(self) -> None:
        self._s_per_byte: float | None = None
        self._done_s = 0.0

    def measured(self, num_bytes: int, elapsed_s: float) -> None:
        """Note that a copy of `num_bytes` took `elapsed_s` on the device."""
        self._s_per_byte = elapsed_s / num_bytes

    def expect(self, num_bytes: int, now: float) -> float | None:
        """Seconds until a copy that starts after all others is done; None = not known yet."""
        if self._s_per_byte is None:
            return None
        self._done_s = max(self._done_s, now) + num_bytes * self._s_per_byte
        return self._done_s - now


class PinnedCache:
    """Copies images through pinned memory into one arena."""

    def __init__(self, arena: ArenaBuffer, num_bytes: int) -> None:
        """Pins as many blocks of the arena's size as fit into `num_bytes`, and at least one."""
        self._arena = arena
        num_blocks = max(1, num_bytes // arena.block_bytes)
        self._memory = huge_pages(num_blocks * arena.block_bytes)
        if arena.data.is_cuda:
            _pin(self._memory)
            weakref.finalize(self, _unpin, self._memory).atexit = False
        self._pool = PinnedPool(num_blocks, arena.pages_per_block)
        self._stream = torch.cuda.Stream(arena.data.device) if arena.data.is_cuda else None
        self._readers = ThreadPoolExecutor(
            min(MAX_READERS, -(-3 * usable_cores() // 4)), "read adapters"
        )
        self._forecast = CopyForecast()
        self._first: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        """Begin and end of the last copy's first chunk, and its bytes, until its time is known."""
        self._under_way: dict[Path, torch.cuda.Event] = {}
        """Ends of the last copies."""
        self.stalls = StallTimer(_now)

    def __contains__(self, folder: Path) -> bool:
        return folder in self._pool

    def index_of(self, folder: Path, image: Image) -> ImageIndex:
        """The index of an image, which need not be read if the image is here."""
        held = self._pool.find(folder, image.sha256)
        return image.index if held is None else held.index

    def take_left(self) -> tuple[Path, ...]:
        """Folders whose images have left pinned memory since the last call."""
        return self._pool.take_left()

    def copy(
        self, folder: Path, image: Image, first_pages: Sequence[int], step_s: float
    ) -> tuple[CopyEvents | None, float]:
        """Fill the extents at `first_pages`, which no step reads, after reading the image of
        `folder` into pinned memory.

        A copy that is expected to end within a step of `step_s` stays under way: the bytes of
        each layer arrive before the step needs them. Other copies are waited for.

        Returns:
            What the step's stream has to wait for, None = nothing, and seconds that are expected to
            pass until the device has everything.

        Raises:
            DataLoss: the image ends early; the extents' bytes are undefined then.
        """
        index = self.index_of(folder, image)
        lengths = extent_lengths(index.num_pages, index.num_bytes, self._arena.block_bytes)
        memory, sources, is_here = self._staged(folder, image.sha256, index, lengths)
        chunks = cut(lengths, sources, self._offsets(first_pages))
        reads: list[Future[None]] = []
        if not is_here:
            data = memory.numpy().data
            reads = [
                self._readers.submit(image.read_into, [data[p.source :][: p.num_bytes]], p.begin)
                for p in chunks
            ]
        try:
            if self._stream is None:
                self._copy_chunks(memory, chunks, reads)
                return None, 0.0
            self._measure()
            with torch.cuda.stream(self._stream):
                events = self._copy_chunks(memory, chunks, reads, _now)
        except BaseException:
            self._abandon(folder, reads)
            raise
        if not events:
            return None, 0.0
        self._under_way[folder] = events[-1]
        num_bytes = sum(
            p.num_bytes for p, event in zip(chunks, events[1:], strict=True) if not event.query()
        )
        expected_s = self._forecast.expect(num_bytes, time.perf_counter())
        if expected_s is None or expected_s > step_s:
            self._stream.synchronize()
            self._measure()
            return None, 0.0
        ends = [p.begin + p.num_bytes for p in chunks]
        of_extents = [events[1 + bisect_left(ends, end)] for end in accumulate(lengths)]
        return CopyEvents(index, of_extents, self.stalls), expected_s

    def _staged(
        self, folder: Path, sha256: bytes, index: ImageIndex, lengths: Sequence[int]
    ) -> tuple[Tensor, list[int], bool]:
        """Pinned memory for an image, the offset of each extent there, and whether it is filled."""
        held = self._pool.find(folder, sha256)
        if held is not None:
            return self._memory, self._offsets(held.first_pages), True
        extents = self._pool.enter(folder, sha256, index)
        self._await_evicted(folder)
        if extents is not None:
            return self._memory, self._offsets(extents.first_pages), False
        # Larger than the pool: torch keeps the memory until the copy is done.
        is_cuda = self._arena.data.is_cuda
        memory = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=is_cuda)
        return memory, [0, *accumulate(lengths)][:-1], False

    def _offsets(self, first_pages: Sequence[int]) -> list[int]:
        return [first_page * self._arena.page_bytes for first_page in first_pages]

    def _await_evicted(self, entered: Path) -> None:
        """Wait for copies from pages that the image that has just `entered` may have been given."""
        for folder, copied in list(self._under_way.items()):
            if folder == entered or folder not in self._pool:
                copied.synchronize()
            if copied.query():
                del self._under_way[folder]

    def _abandon(self, folder: Path, reads: Sequence[Future[None]]) -> None:
        """Give back the pages of an image that could not be copied."""
        wait(reads)  # they write to them
        if self._stream is not None:
            self._stream.synchronize()
        if folder in self._pool:
            self._pool.drop(folder)

    def _copy_chunks(
        self,
        memory: Tensor,
        chunks: Sequence[CopyChunk],
        reads: Sequence[Future[None]],
        now: Callable[[], torch.cuda.Event] | None = None,
    ) -> list[torch.cuda.Event]:
        """Copy each chunk as soon as it is read, in the current stream. Raises what a read raised.

        Returns:
            One event before all copies and one after each, made by `now`.
        """
        arena = self._arena.flat(torch.uint8)
        events = [now()] if now is not None and chunks else []
        for number, (_, source, target, num_bytes) in enumerate(chunks):
            if reads:
                reads[number].result()
            part = memory[source : source + num_bytes]
            arena[target : target + num_bytes].copy_(part, non_blocking=True)
            if now is not None:
                events.append(now())
                if not number:
                    self._first = events[0], events[1], num_bytes
        return events

    def _measure(self) -> None:
        """Note the duration of the last copy's first chunk if it has ended: the next ones may have
        waited to be read."""
        if self._first is not None and self._first[1].query():
            begin, end, num_bytes = self._first
            self._forecast.measured(num_bytes, begin.elapsed_time(end) / 1e3)
            self._first = None


def _pin(memory: Tensor) -> None:
    """Pin host memory, until `_unpin`. `pin_memory=True` would round its size up to a power of
    two. Raises InvalidRequest if the driver refuses, which names the setting."""
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result):
        why = f"cannot be pinned ({cudart.cudaGetErrorString(result)}); set a smaller size"
        raise InvalidRequest.field("LORAPLEX_HOST_CACHE_BYTES", memory.nbytes, why)


def _unpin(memory: Tensor) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
