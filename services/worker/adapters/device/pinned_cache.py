"""Images in pinned host memory, between the disk cache and the arena of a GPU.

    image file --read once--> pinned memory --copied by the GPU--> extents of the arena

One thread copies while steps run. Several others read parts of an image for it, and the GPU copies
each part as soon as it has been read. Without a GPU, the same code copies at once, for tests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.adapters.device.copy_events import CopyEvents, StallTimer
from loraplex_services.worker.adapters.device.pinned_pool import PinnedPool
from loraplex_services.worker.adapters.pack.image import Image
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.cores import usable_cores
from loraplex_services.worker.native.pages import huge_pages
from loraplex_services.worker.types.extents import extent_lengths

GROUP_EXTENTS = 4
"""Extents that are read by one thread, copied together, and followed by one event."""
MAX_READERS = 8
"""Most threads that read one image. One thread reads 84 MB from the page cache in 14 ms next to an
H200, in which time the GPU copies nine times as many bytes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some extents of an image, which are read and copied together."""

    rows: Sequence[Tensor]
    """Bytes of each extent in pinned memory."""
    starts: Sequence[int]
    """Byte offset in the arena of each extent."""
    read: Future[None] | None
    """Fills the rows; None = they are filled."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents."""
        return sum(map(len, self.rows))


class CopyForecast:
    """Predicts when copies will be done, from the rate of earlier ones. Pure arithmetic."""

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
            min(MAX_READERS, -(-usable_cores() // 2)), "read adapters"
        )
        self._forecast = CopyForecast()
        self._first: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        """Begin and end of the last copy's first group, and its bytes, until its time is known."""
        self._under_way: dict[Path, torch.cuda.Event] = {}
        """Ends of the last copies."""
        self.stalls = StallTimer(_now)

    def __contains__(self, folder: Path) -> bool:
        return folder in self._pool

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
        groups = self._staged(folder, image, first_pages)
        try:
            if self._stream is None:
                for group in groups:
                    self._copy_group(group)
                return None, 0.0
            self._measure()
            with torch.cuda.stream(self._stream):
                events = self._enqueue(groups)
        except BaseException:
            self._abandon(folder, groups)
            raise
        if not events:
            return None, 0.0
        self._under_way[folder] = events[-1]
        unfinished = zip(groups, events, strict=True)
        num_bytes = sum(group.num_bytes for group, event in unfinished if not event.query())
        expected_s = self._forecast.expect(num_bytes, time.perf_counter())
        if expected_s is None or expected_s > step_s:
            self._stream.synchronize()
            self._measure()
            return None, 0.0
        of_extents = [
            event for group, event in zip(groups, events, strict=True) for _ in group.rows
        ]
        return CopyEvents(image.index, of_extents, self.stalls), expected_s

    def _staged(self, folder: Path, image: Image, first_pages: Sequence[int]) -> list[Group]:
        """Where the image is in pinned memory, and where it is copied to. Begins to read it if it
        was not there."""
        index = image.index
        lengths = extent_lengths(index.num_pages, index.num_bytes, self._arena.block_bytes)
        extents = self._pool.find(folder, image.sha256)
        is_here = extents is not None
        if extents is None:
            extents = self._pool.enter(folder, image.sha256, index.num_pages)
            self._await_evicted(folder)
        if extents is not None:
            rows = [
                self._memory[start : start + length]
                for start, length in zip(self._starts(extents.first_pages), lengths, strict=True)
            ]
        else:  # larger than the pool; torch keeps the memory until the copy is done
            is_cuda = self._arena.data.is_cuda
            rows = list(
                torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=is_cuda).split(lengths)
            )
        starts, begins = self._starts(first_pages), [0, *accumulate(lengths)]
        groups = []
        for first in range(0, len(rows), GROUP_EXTENTS):
            part, read = slice(first, first + GROUP_EXTENTS), None
            if not is_here:
                buffers = [row.numpy().data for row in rows[part]]
                read = self._readers.submit(image.read_into, buffers, begins[first])
            groups.append(Group(rows[part], starts[part], read))
        return groups

    def _starts(self, first_pages: Sequence[int]) -> list[int]:
        return [first_page * self._arena.page_bytes for first_page in first_pages]

    def _await_evicted(self, entered: Path) -> None:
        """Wait for copies from pages that the image that has just `entered` may have been given."""
        for folder, copied in list(self._under_way.items()):
            if folder == entered or folder not in self._pool:
                copied.synchronize()
            if copied.query():
                del self._under_way[folder]

    def _abandon(self, folder: Path, groups: Sequence[Group]) -> None:
        """Give back the pages of an image that could not be copied."""
        wait([group.read for group in groups if group.read is not None])  # they write to them
        if self._stream is not None:
            self._stream.synchronize()
        if folder in self._pool:
            self._pool.drop(folder)

    def _enqueue(self, groups: Sequence[Group]) -> list[torch.cuda.Event]:
        """Enqueue copies in the current stream. Returns the event after each group."""
        begin = _now()
        events: list[torch.cuda.Event] = []
        for group in groups:
            self._copy_group(group)
            events.append(_now())
        if events:
            self._first = begin, events[0], groups[0].num_bytes
        return events

    def _copy_group(self, group: Group) -> None:
        """Copy a group as soon as it is read. Raises what its read raised."""
        if group.read is not None:
            group.read.result()
        self._copy_rows(group.starts, group.rows)

    def _copy_rows(self, starts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Copy rows to byte offsets in the arena, with one copy where rows are adjacent on both
        sides."""
        arena = self._arena.flat(torch.uint8)
        for first, end in _stretches(starts, rows):
            num_bytes = sum(map(len, rows[first:end]))
            target = arena[starts[first] : starts[first] + num_bytes]
            target.copy_(rows[first].as_strided((num_bytes,), (1,)), non_blocking=True)

    def _measure(self) -> None:
        """Note the duration of the last copy's first group if it has ended: the next groups may
        have waited to be read."""
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


def _stretches(starts: Sequence[int], rows: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Ranges [first, end) of rows, all of one storage, that follow each other there and at their
    `starts`."""
    first = 0
    for i in range(1, len(starts) + 1):
        if i < len(starts) and starts[i] == starts[i - 1] + len(rows[i - 1]):
            before = rows[i - 1]
            if rows[i].storage_offset() == before.storage_offset() + len(before):
                continue
        yield first, i
        first = i


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
