"""What is refused before a request is read: hosts, and bodies that are too large."""

from __future__ import annotations

import asyncio

import pytest

from loraplex_services.gateway.http.guard import HostRule
from tests.gateway.conftest import Stack


@pytest.mark.parametrize(("host", "status"), [("localhost", b"400"), ("evil.example", b"403")])
async def test_a_client_that_sends_all_before_it_reads_is_told_why_it_is_refused(
    stack: Stack, host: str, status: bytes
) -> None:
    await stack.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.running.http_port)
    head = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {16 << 20}"
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
    for _ in range(16):
        writer.write(b" " * (1 << 20))
        await writer.drain()
    assert (await reader.readline()).split()[1] == status
    writer.close()


@pytest.mark.hostile
async def test_a_request_whose_end_two_headers_put_in_different_places_is_refused(
    stack: Stack,
) -> None:
    await stack.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.running.http_port)
    head = "host: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked"
    # It ends the connection if it is served, so that the answers have an end in any case.
    hidden = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n0\r\n\r\n{hidden}".encode())
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    writer.close()


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("localhost:8080", True),
        ("127.0.0.2:1", True),
        ("[::1]:8080", True),
        ("gate.internal:80", True),
        ("GATE.internal", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("[::1]evil.example", False),
        ("[::1", False),
        ("localhost:80@evil.example", False),
    ],
)
def test_host_rule(host: str, allowed: bool) -> None:
    assert HostRule(frozenset({"gate.internal"})).allows(host) is allowed
