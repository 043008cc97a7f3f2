"""Tells glibc to keep freed memory for the next message, or to return it."""

from __future__ import annotations

import contextlib
import ctypes

_LARGE_BYTES = 8 << 20


def reuse_large_blocks() -> None:
    """Make the C library keep freed blocks of a message's size for reuse.

    A stream of 1 MiB messages otherwise spends most of its time in page faults: glibc maps every
    such block again and unmaps it after use, until a larger one has been freed, which raises the
    threshold for the life of the process. That block is never written to, so it costs no memory.
    With another C library, nothing happens.
    """
    bytearray(_LARGE_BYTES)


def return_free_memory() -> None:
    """Return freed memory to the system. With another C library, nothing happens."""
    with contextlib.suppress(AttributeError, TypeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
