"""Writes files so that they survive a crash: complete files, with folders synced."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

_COPY_BYTES = 1 << 20


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, where a system call may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def copy_range(source: Path, offset: int, length: int, out: int) -> None:
    """Append a range of a file to the open file `out`. Raises OSError, also if the file ends
    before the range does."""
    with open(source, "rb", buffering=0) as file:
        while length:
            data = os.pread(file.fileno(), min(length, _COPY_BYTES), offset)
            if not data:
                raise OSError(errno.EIO, f"the file ends at byte {offset}", str(source))
            write_all(out, data)
            offset, length = offset + len(data), length - len(data)


def into_folder(path: Path, move: Callable[[], None], *, durable: bool) -> None:
    """Run `move`, making the folder of `path` first if it is missing. Without `durable`, a power
    failure may remove the name, and the new folders."""
    for _ in range(8):
        # A collector may remove the folder again while it is empty.
        with contextlib.suppress(FileNotFoundError):
            move()
            break
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent, durable)
    else:
        move()
    if durable:
        sync_folder(path.parent)


def _make_folder(folder: Path, durable: bool) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        child.mkdir(exist_ok=True)
        if durable:
            sync_folder(child.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable. A folder that was just removed has none."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
