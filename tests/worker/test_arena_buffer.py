"""The arena's memory, before anything is written to it."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from loraplex_services.worker.arena_buffer import AHEAD_BYTES, ArenaBuffer

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64


def is_provided(arena: ArenaBuffer, begin: int, end: int) -> bool:
    """Whether the system has memory for all bytes from `begin` to `end`."""
    pages = ctypes.create_string_buffer((end - begin) // mmap.PAGESIZE)
    address = ctypes.c_void_p(arena.data.data_ptr() + begin)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(end - begin), pages) == 0
    return all(page & 1 for page in pages.raw)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux provides memory on request")
def test_memory_is_provided_ahead_of_the_blocks_that_are_written() -> None:
    arena = ArenaBuffer(NUM_BLOCKS, BLOCK_BYTES, torch.device("cpu"))
    size = arena.data.nbytes
    assert is_provided(arena, 0, AHEAD_BYTES)
    assert not is_provided(arena, AHEAD_BYTES, size)
    arena.data[:2] = 7
    arena.provide_after(20 * BLOCK_BYTES)
    assert is_provided(arena, 20 * BLOCK_BYTES, 20 * BLOCK_BYTES + AHEAD_BYTES)
    assert not is_provided(arena, AHEAD_BYTES, 20 * BLOCK_BYTES)  # nothing asked for it
    arena.provide_after(size - BLOCK_BYTES)
    arena.provide_after(0)
    assert not is_provided(arena, 40 * BLOCK_BYTES, size - BLOCK_BYTES)
    assert (arena.data[:2] == 7).all()
