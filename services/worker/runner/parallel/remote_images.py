"""Images of adapters for ranks of other machines, read from rank 0's disk over TCP.

    rank -> rank 0   copy id, position, number of bytes (8 bytes each, little endian)
    rank 0 -> rank   number of bytes that follow (8), -1 = there is no such file; the bytes

A rank reads only its own image. It keeps no copy on disk.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from loraplex_services.worker.runner.parallel.messages import close_socket
from loraplex_services.worker.runner.parallel.rendezvous import receive

_ASK = struct.Struct("<QQQ")
_ANSWER = struct.Struct("<q")
NO_FILE = -1


class ImageSender:
    """Rank 0's end for one other rank, on a thread of its own."""

    def __init__(self, end: socket.socket, rank: int, find: Callable[[int], Path | None]) -> None:
        """
        Args:
            find: the file of a copy that is under way, by its id.
        """
        self._socket = end
        self._find = find
        threading.Thread(target=self._serve, daemon=True, name=f"images of rank {rank}").start()

    def close(self) -> None:
        """Close the connection."""
        close_socket(self._socket)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the rank has gone, which its other connection reports
            while True:
                self._answer(*_ASK.unpack(receive(self._socket, _ASK.size)))

    def _answer(self, copy_id: int, position: int, num_bytes: int) -> None:
        path = self._find(copy_id)
        try:
            file = None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            file = None
        if file is None:
            self._socket.sendall(_ANSWER.pack(NO_FILE))
            return
        try:
            left = max(0, min(num_bytes, os.fstat(file).st_size - position))
            self._socket.sendall(_ANSWER.pack(left))
            while left:
                count = os.sendfile(self._socket.fileno(), file, position, left)
                if not count:  # the file became shorter: the answer cannot be completed
                    raise ConnectionAbortedError("an image was cut while it was sent")
                position, left = position + count, left - count
        finally:
            os.close(file)


class RemoteBytes:
    """Implements `adapters.pack.image.ImageBytes` at the end of the rank that reads."""

    def __init__(self, end: socket.socket, copy_id: int) -> None:
        self._socket = end
        self._copy_id = copy_id
        self._lock = threading.Lock()

    def read(self, buffers: Sequence[memoryview], position: int) -> int:
        """See `ImageBytes`."""
        with self._lock:
            return self._read(buffers, position)

    def _read(self, buffers: Sequence[memoryview], position: int) -> int:
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        self._socket.sendall(_ASK.pack(self._copy_id, position, num_bytes))
        (count,) = _ANSWER.unpack(receive(self._socket, _ANSWER.size))
        if count == NO_FILE:
            raise FileNotFoundError("rank 0 has no image for this rank")
        left = count
        for buffer in buffers:
            part = buffer[: min(left, buffer.nbytes)]
            left -= part.nbytes
            while part:
                num_read = self._socket.recv_into(part)
                if not num_read:
                    raise ConnectionResetError("rank 0 has closed the connection")
                part = part[num_read:]
        return int(count)

    def close(self) -> None:
        """Does nothing: the next copy uses the same connection."""
