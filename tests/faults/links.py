"""A TCP proxy between two services, whose connections can be disturbed while they are open."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_CHUNK_BYTES = 64 * 1024
_DELAY_S = 0.2
_TORN_AFTER_BYTES = 20_000
_NO_LINGER = struct.pack("ii", 1, 0)
"""Closing a socket with this option resets the connection."""

T = TypeVar("T")


class Disturbance(enum.Enum):
    """What a link does to the bytes that pass."""

    NONE = "none"
    DELAYED = "delayed by 0.2 s"
    RESET = "reset"
    REFUSED = "refused"
    SILENT = "silent"
    """Connections stay open and carry nothing, as behind a firewall that drops packets."""
    TORN = "closed after 20 kB"
    CORRUPT = "one bit of each answer flipped"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Link:
    """Forwards connections on a port of its own to `target`, a port of loopback."""

    def __init__(self, loop: Loop, target: int) -> None:
        self._loop = loop
        self._target = target
        self._disturbance = Disturbance.NONE
        self._changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._loop.run(self._listen())

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    def disturb(self, how: Disturbance) -> None:
        """Disturb connections from now on, open ones too. `NONE` ends it."""
        self._loop.run(self._disturb(how))

    def close(self) -> None:
        """Stop listening and close every connection."""
        self.disturb(Disturbance.REFUSED)

    async def _disturb(self, how: Disturbance) -> None:
        was, self._disturbance = self._disturbance, how
        self._changed.set()
        self._changed = asyncio.Event()
        if how is Disturbance.REFUSED and self._server is not None:
            self._server.close()
            self._server = None
        if how in (Disturbance.REFUSED, Disturbance.RESET, Disturbance.TORN):
            for writer in list(self._open):
                _reset(writer)
        elif was is Disturbance.REFUSED:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._disturbance is Disturbance.RESET:
            _reset(writer)
            return
        try:
            await self._unless_silent()
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        self._open |= {writer, back}
        try:
            await asyncio.gather(
                self._pump(reader, back, self._pass_on), self._pump(there, writer, self._answer)
            )
        finally:
            self._open -= {writer, back}
            writer.close()
            back.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[bytes, int], Awaitable[bytes]],
    ) -> None:
        num_bytes = 0
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await self._unless_silent()
                writer.write(await change(data, num_bytes))
                await writer.drain()
                num_bytes += len(data)
            writer.write_eof()
        except (OSError, RuntimeError):
            _reset(writer)

    async def _unless_silent(self) -> None:
        while self._disturbance is Disturbance.SILENT:
            await self._changed.wait()

    async def _pass_on(self, data: bytes, _: int) -> bytes:
        if self._disturbance is Disturbance.DELAYED:
            await asyncio.sleep(_DELAY_S)
        return data

    async def _answer(self, data: bytes, num_before: int) -> bytes:
        """An answer as the client gets it. Raises ConnectionError to tear the connection."""
        how = self._disturbance
        if how is Disturbance.TORN and num_before + len(data) > _TORN_AFTER_BYTES:
            raise ConnectionResetError
        if how is Disturbance.CORRUPT and len(data) > 1:
            return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
        return await self._pass_on(data, num_before)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a host does that knows nothing of the connection."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):  # it may be closed by now
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
