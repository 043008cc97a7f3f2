"""HTTP connections that send no request, or half of one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loraplex_services.common import limits
from loraplex_services.gateway.http import connections
from tests.gateway.conftest import Stack, eventually

pytestmark = pytest.mark.hostile
REQUEST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def _connected(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", stack.running.http_port)


@pytest.mark.parametrize("sent", [REQUEST[:1], REQUEST[:20], REQUEST[:-2]])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_connection_whose_request_does_not_arrive_is_closed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, sent: bytes, is_first: bool
) -> None:
    monkeypatch.setattr(connections, "MAX_HTTP_HEADER_S", 0.2)
    await stack.start()
    reader, writer = await _connected(stack)
    if not is_first:
        writer.write(REQUEST)
        await reader.readuntil(b"ok\n")
    writer.write(sent)
    async with asyncio.timeout(30):
        while await reader.read(1 << 16):
            pass
    writer.close()


async def test_a_head_that_trickles_in_gets_no_more_time(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_HTTP_HEADER_S", 0.2)
    await stack.start()
    reader, writer = await _connected(stack)
    closed = asyncio.create_task(reader.read())
    async with asyncio.timeout(30):
        while not closed.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
    writer.close()


@pytest.mark.parametrize("headers", [b"a:\r\n" * 300, b"a:" + b"b" * 20_000 + b"\r\n"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_head_of_many_lines_or_bytes_is_refused_before_it_is_parsed(
    stack: Stack, headers: bytes, is_first: bool
) -> None:
    await stack.start()
    reader, writer = await _connected(stack)
    many = REQUEST[:-2] + headers + b"\r\n"
    writer.write(many if is_first else REQUEST + many)
    async with asyncio.timeout(30):
        answered = await reader.read()
    assert answered.count(b"200 OK") == (not is_first)
    assert answered.count(b"400 Bad Request") == 1
    writer.close()


async def test_a_small_head_with_a_body_larger_than_any_head_is_read(stack: Stack) -> None:
    await stack.start()
    reader, writer = await _connected(stack)
    size = 4 * limits.MAX_HTTP_HEAD_BYTES
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % size + b" " * size + REQUEST)
    async with asyncio.timeout(30):
        for _ in range(2):
            assert b"200 OK" in await reader.readuntil(b"ok\n")
    writer.close()


async def test_connections_beyond_the_limit_are_closed_and_the_others_served(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.start()
    monkeypatch.setattr(connections, "MAX_HTTP_CONNECTIONS", 4)
    held = [await _connected(stack) for _ in range(4)]
    await asyncio.sleep(0)
    reader, writer = await _connected(stack)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
        held[0][1].write(REQUEST)
        assert b"200 OK" in await held[0][0].readline()
    for _, each in [*held, (reader, writer)]:
        each.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
async def test_a_body_in_chunks_of_one_byte_is_refused(stack: Stack, path: str) -> None:
    """Also if the request was answered before its body had arrived."""
    await stack.start()
    reader, writer = await _connected(stack)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
    async with asyncio.timeout(30):
        if path == "/nowhere":
            assert b"404" in await reader.readline()
        writer.write(b"1\r\n \r\n" * (limits.MAX_SMALL_HTTP_CHUNKS + 1))
        answer = await reader.read()
    assert path == "/nowhere" or answer.startswith(b"HTTP/1.1 400")
    writer.close()


async def test_a_body_in_chunks_of_ordinary_size_is_read(stack: Stack) -> None:
    await stack.start()
    reader, writer = await _connected(stack)
    chunks = [b" " * limits.MIN_HTTP_CHUNK_BYTES] * (limits.MAX_SMALL_HTTP_CHUNKS + 9)
    chunks += [b'{"model":"base","prompt":"x"}', b""]
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    writer.writelines(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    async with asyncio.timeout(30):
        assert b"200 OK" in await reader.readline()
    writer.close()


@pytest.mark.parametrize("headers", [b"a:b\r\n", b"a:b\r\n" * 300, b""])
async def test_headers_after_a_body_are_refused_before_they_are_parsed(
    stack: Stack, headers: bytes
) -> None:
    """Without a key, 256 KiB of them stopped the event loop for half a second."""
    await stack.start()
    reader, writer = await _connected(stack)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b'transfer-encoding: chunked\r\n\r\n1d\r\n{"model":"base","prompt":"x"}\r\n0\r\n'
    )
    writer.write(headers + b"\r\n")
    async with asyncio.timeout(30):
        status = await reader.readline()
    assert (b"400 Bad Request" if headers else b"200 OK") in status
    writer.close()


async def test_a_client_that_does_not_read_its_answer_loses_its_connection(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not read stays in memory. A reader that is slow, but reads, is served."""
    monkeypatch.setattr(connections, "MAX_HTTP_UNREAD_S", 0.1)
    monkeypatch.setattr(connections, "MIN_HTTP_READ_BYTES", 1)
    await stack.start()
    size = 7 << 20
    body = b'{"model":"base","input":"x","user":"%b"}' % (b"u" * size)
    head = (
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    with client:
        await loop.sock_connect(client, ("127.0.0.1", stack.running.http_port))
        await loop.sock_sendall(client, head + body)
        http = stack.running._http
        assert http is not None
        connected = http._server.server_state.connections
        await eventually(lambda: not connected, 60)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_an_offer_to_upgrade_is_ignored_and_fills_no_log(
    stack: Stack, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another protocol would have other limits, and some clients offer one with each request."""
    await stack.start()
    caplog.clear()
    reader, writer = await _connected(stack)
    offer = b"connection: upgrade\r\nupgrade: %b\r\n" % protocol.encode()
    writer.write(REQUEST[:-2] + offer + b"sec-websocket-version: 13\r\n\r\n")
    async with asyncio.timeout(30):
        assert b"200 OK" in await reader.readline()
    assert not caplog.messages
    writer.close()
