"""Connections that open HTTP/2 streams without a key."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

_STREAMS_PER_CONNECTION = 100
_NUM_CONNECTIONS = 50
"""The number of connections that are open at the same time."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_NO_WINDOW = b"\x00\x04\x00\x00\x00\x00"
"""The setting that a server may send no data on new streams."""
_EMPTY_MESSAGE = bytes(5)
_CANCEL = (8).to_bytes(4, "big")
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Flood:
    """The frames that a flood sent."""

    connections: int
    streams: int


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header without Huffman coding and outside the table of headers."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def opening(
    num_streams: int,
    *,
    resets: bool = False,
    asks: bool = False,
    path: str = WATCH,
    key: str = "",
) -> bytes:
    """The bytes of a client that opens streams and acknowledges no settings.

    Args:
        asks: sends an empty request on each stream, and reads no answers.
    """
    headers = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    headers |= {"authorization": key} if key else {}
    block = b"".join(_literal(k.encode(), v.encode()) for k, v in headers.items())
    sent = _PREFACE + _frame(_SETTINGS, 0, 0, _NO_WINDOW if asks else b"")
    for stream in range(1, 2 * num_streams, 2):
        sent += _frame(_HEADERS, _END_HEADERS, stream, block)
        sent += _frame(_DATA, _END_STREAM, stream, _EMPTY_MESSAGE) if asks else b""
        sent += _frame(_RST_STREAM, 0, stream, _CANCEL) if resets else b""
    return sent


async def ended_stream(reader: asyncio.StreamReader) -> int:
    """The next stream that the server ends with a status."""
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == _HEADERS and head[4] & _END_STREAM:
            return int.from_bytes(head[5:], "big")


async def num_refused(port: int, num_streams: int, expected: int) -> int:
    """Open streams on one connection, and return how many were reset once as many as expected
    were."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(opening(num_streams))
    count = 0
    try:
        while count < expected:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            count += head[3] == _RST_STREAM
    finally:
        writer.close()
    return count


async def flood(
    port: int,
    seconds: float,
    hosts: Sequence[str],
    *,
    tls: ssl.SSLContext | None = None,
    resets: bool,
) -> Flood:
    """Open connections from these loopback addresses, each of which leaves at once."""
    sent = opening(_STREAMS_PER_CONNECTION, resets=resets)
    end_s = time.monotonic() + seconds
    sources = itertools.cycle(hosts)
    num_opened = 0

    async def client() -> None:
        nonlocal num_opened
        while time.monotonic() < end_s:
            try:
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=tls, local_addr=(next(sources), 0)
                )
                writer.write(sent)
                await writer.drain()
                writer.transport.abort()
                num_opened += 1
            except OSError:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(_NUM_CONNECTIONS)))
    return Flood(num_opened, num_opened * _STREAMS_PER_CONNECTION)
