"""The TCP connections to some ports of this process, which gRPC accepts and does not show.

The system calls are those of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_BACKLOG = 128
"""Connections that the kernel accepts before gRPC does. gRPC lets it accept 4,096, each with
data."""
_NO_ADDRESS = struct.pack("H14x", socket.AF_UNSPEC)
"""Connecting to it resets a connection and drops what has arrived. gRPC would still read this after
a shutdown."""
_libc = ctypes.PyDLL(None)
"""Keeps the GIL during a call: other threads would hold it for long each time."""
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A filter of one instruction, "return 0": the packet is dropped."""


class Connections:
    """The connections to these ports, and the sockets that accept them.

    Sockets are used through a duplicate, so that gRPC cannot close them meanwhile. The duplicate
    takes the place of an open file of its own: strangers may have taken all others.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = ports
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._duplicate = os.dup(self._nothing)
        self._listeners = [
            # Not opened.dup(), which would make gRPC's socket a blocking one.
            socket.socket(fileno=os.dup(opened.fileno()))
            for opened in self._sockets()
            if _is_listening(opened)
        ]
        for listener in self._listeners:
            listener.listen(_BACKLOG)

    def release(self) -> None:
        """Close the files that it holds open."""
        for listener in self._listeners:
            listener.close()
        os.close(self._duplicate)
        os.close(self._nothing)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accept no new connections meanwhile. Clients try again by themselves, after a second."""
        program = struct.pack("HL", 1, ctypes.addressof(_DROP))
        try:
            for listener in self._listeners:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            yield
        finally:
            for listener in self._listeners:
                with contextlib.suppress(OSError):  # it has no filter
                    listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self, is_kept: Callable[[str], object]) -> int:
        """Close the connections except for those that are kept, by gRPC's names of their peers;
        how many."""
        count = 0
        for opened in self._sockets():
            if _is_listening(opened):
                continue
            peer = _peer(opened)
            if not peer or not is_kept(peer):
                _libc.connect(opened.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))
                count += bool(peer)
        return count

    def _sockets(self) -> Iterator[socket.socket]:
        for number in _open_files():
            if number in (self._duplicate, self._nothing):
                continue
            if _libc.dup3(number, self._duplicate, os.O_CLOEXEC) < 0:
                continue  # closed meanwhile
            try:
                opened = socket.socket(fileno=self._duplicate)
            except OSError:
                continue
            try:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and (
                    opened.getsockname()[1] in self._ports
                ):
                    yield opened
            finally:
                opened.detach()
        _libc.dup3(self._nothing, self._duplicate, os.O_CLOEXEC)


def _open_files() -> Iterable[int]:
    try:
        return [int(number) for number in os.listdir("/proc/self/fd")]
    except OSError:  # the process has as many open files as it may
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _is_listening(opened: socket.socket) -> bool:
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer(opened: socket.socket) -> str:
    """gRPC's name of the peer, unquoted; "" if the connection has ended."""
    try:
        host, port = opened.getpeername()[:2]
    except OSError:
        return ""
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
