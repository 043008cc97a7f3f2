"""Images in pinned host memory, between the disk cache and the arena of a GPU.

    image file --read once--> pinned memory --copied by the GPU--> extents of the arena

One thread copies while steps run. Without a GPU, the same code copies at once, for tests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.adapters.device.copy_events import CopyEvents, StallTimer
from loraplex_services.worker.adapters.device.pinned_pool import PinnedPool
from loraplex_services.worker.adapters.pack.image import Image
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.types.extents import extent_lengths

EVENT_EXTENTS = 8
"""Extents between two events. With one after each block, 84 MB took 2.3 ms on an H200, where a
plain pinned copy takes 1.5 ms; a group of 16 MiB takes 0.3 ms, which is how long a layer may wait
more.
"""


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
        self._memory = torch.empty(num_blocks * arena.block_bytes, dtype=torch.uint8)
        if arena.data.is_cuda:
            _pin(self._memory)
            weakref.finalize(self, _unpin, self._memory).atexit = False
        self._pool = PinnedPool(num_blocks, arena.pages_per_block)
        self._stream = torch.cuda.Stream(arena.data.device) if arena.data.is_cuda else None
        self._forecast = CopyForecast()
        self._last: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None
        """Begin and end of the last copy, and its bytes, until its time is known."""
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
        rows = self._staged(folder, image)
        starts = [first_page * self._arena.page_bytes for first_page in first_pages]
        if self._stream is None:
            self._copy_rows(starts, rows)
            return None, 0.0
        self._measure()
        with torch.cuda.stream(self._stream):
            events = self._enqueue(starts, rows)
        expected_s = self._forecast.expect(image.index.num_bytes, time.perf_counter())
        if expected_s is None or expected_s > step_s:
            self._stream.synchronize()
            self._measure()
            return None, 0.0
        return CopyEvents(image.index, events, self.stalls), expected_s

    def _staged(self, folder: Path, image: Image) -> list[Tensor]:
        """The image's bytes in pinned memory, extent by extent."""
        sha256, index = image.sha256, image.index
        lengths = extent_lengths(index.num_pages, index.num_bytes, self._arena.block_bytes)
        extents = self._pool.find(folder, sha256)
        if extents is not None:
            return self._rows(self._memory, extents.first_pages, lengths)
        extents = self._pool.enter(folder, sha256, index.num_pages)
        if self._stream is not None:
            self._stream.synchronize()  # evicted images may still be copied
        if extents is not None:
            rows = self._rows(self._memory, extents.first_pages, lengths)
        else:  # larger than the pool; torch keeps the memory until the copy is done
            is_cuda = self._arena.data.is_cuda
            rows = list(
                torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=is_cuda).split(lengths)
            )
        try:
            image.read_into([row.numpy().data for row in rows])
        except BaseException:
            if extents is not None:
                self._pool.drop(folder)
            raise
        return rows

    def _rows(
        self, memory: Tensor, first_pages: Sequence[int], lengths: Sequence[int]
    ) -> list[Tensor]:
        starts = [first_page * self._arena.page_bytes for first_page in first_pages]
        return [memory[s : s + n] for s, n in zip(starts, lengths, strict=True)]

    def _enqueue(self, starts: Sequence[int], rows: Sequence[Tensor]) -> list[torch.cuda.Event]:
        """Enqueue copies in the current stream. Returns, for each row, the event after its group of
        EVENT_EXTENTS."""
        begin = _now()
        events: list[torch.cuda.Event] = []
        for first in range(0, len(starts), EVENT_EXTENTS):
            group = slice(first, first + EVENT_EXTENTS)
            self._copy_rows(starts[group], rows[group])
            events += [_now()] * len(rows[group])
        if events:
            self._last = begin, events[-1], sum(map(len, rows))
        return events

    def _copy_rows(self, starts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Copy rows to byte offsets in the arena, with one copy where rows are adjacent on both
        sides."""
        arena = self._arena.flat(torch.uint8)
        for first, end in _stretches(starts, rows):
            num_bytes = sum(map(len, rows[first:end]))
            target = arena[starts[first] : starts[first] + num_bytes]
            target.copy_(rows[first].as_strided((num_bytes,), (1,)), non_blocking=True)

    def _measure(self) -> None:
        """Note the duration of the last copy if it has ended."""
        if self._last is not None and self._last[1].query():
            begin, end, num_bytes = self._last
            self._forecast.measured(num_bytes, begin.elapsed_time(end) / 1e3)
            self._last = None


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
