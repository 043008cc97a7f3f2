"""Memory in huge pages, where the system grants them on request.

Weights and adapters are read as many short streams, each of which would miss the cache of page
tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
"""Linux 6.1 and later; older systems refuse it."""


def huge_pages(num_bytes: int) -> Tensor:
    """uint8 `[num_bytes]` in huge pages from the first write on; plain memory elsewhere."""
    memory, pages = _mapped(num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memory


def provide(memory: Tensor) -> None:
    """Have the system provide memory now instead of at the first write to each page, which can take
    milliseconds. Contents stay. Before Linux 5.14 and elsewhere, nothing happens.

    Args:
        memory: begins where a page begins.
    """
    if sys.platform == "linux":
        address, length = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
        ctypes.CDLL(None).madvise(address, length, _MADV_POPULATE_WRITE)


class WeightMemory:
    """Where packed weights are. Many are smaller than a huge page, so they share large chunks.

    The system may have to move other memory before it has huge pages, for half a second in each
    256 MB. Weights are therefore written to small pages, and moved while the worker is serving.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        """The rest of the last chunk."""
        self._written: list[Tensor] = []
        """Chunks in small pages."""
        self._whole: list[Tensor] = []
        """Weights that were added, from their first huge page on."""

    def take(self, num_items: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised `[num_items]`, aligned to 64 bytes."""
        num_bytes = -(-num_items * dtype.itemsize // 64) * 64
        if num_bytes > len(self._free):
            self._free, _ = _mapped(max(num_bytes, CHUNK_BYTES))
            self._written.append(self._free)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken.view(dtype)[:num_items]

    def add(self, weight: Tensor) -> None:
        """Move a dense weight with the others, except for the parts of huge pages at its ends."""
        data = weight.view(-1).view(torch.uint8)
        self._whole.append(data[-data.data_ptr() % PAGE_BYTES :])

    def use_huge_pages(self) -> None:
        """Move what has been taken or added into huge pages, in a thread."""
        chunks, self._written = self._written, []
        others, self._whole = self._whole, []
        if not chunks or sys.platform != "linux":
            return
        sizes = [len(chunk) for chunk in chunks]
        sizes[-1] -= len(self._free)
        self._free = self._free[:0]
        sizes += [len(other) // PAGE_BYTES * PAGE_BYTES for other in others]
        arguments = (chunks + others, sizes)
        threading.Thread(None, _collapse, "huge pages", arguments, daemon=True).start()


def _mapped(num_bytes: int) -> tuple[Tensor, mmap.mmap]:
    """uint8 `[num_bytes]` that begins where a huge page may begin, and its mapping."""
    pages = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -raw.data_ptr() % PAGE_BYTES
    return raw[begin : begin + num_bytes], pages


def _collapse(chunks: list[Tensor], sizes: list[int]) -> None:
    """Contents and addresses stay. A system that refuses leaves the pages small."""
    madvise = ctypes.CDLL(None).madvise
    for chunk, size in zip(chunks, sizes, strict=True):
        address, length = ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(size)
        madvise(address, length, _MADV_COLLAPSE)
