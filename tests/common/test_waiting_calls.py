"""Calls that arrive faster than a gRPC server takes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.serving.http2_flood import opening
from loraplex.errors import Unauthenticated
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.callers import Caller
from loraplex_services.common.grpc import waiting_calls
from loraplex_services.common.grpc.connections import Connections
from loraplex_services.common.grpc.server import RunningServer, start

pytestmark = pytest.mark.hostile

NAME = "loraplex.v1.RegistryService"
KEY = (("authorization", "acme"),)
MOST = 400


class Servicer(registry_pb2_grpc.RegistryServiceServicer):
    """Its watches do not end."""

    async def CreateUpload(
        self, request: pb.CreateUploadRequest, context: Any
    ) -> pb.CreateUploadResponse:
        return pb.CreateUploadResponse()

    async def WatchAdapters(self, request: pb.WatchAdaptersRequest, context: Any) -> Any:
        yield pb.WatchAdaptersResponse(resume_token="1:1")
        await asyncio.Event().wait()


class AnyKey:
    """Accepts every key."""

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if "authorization" not in metadata:
            raise Unauthenticated("no key")
        return Caller("acme", "k1", frozenset({"reader"}))


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(waiting_calls, "MAX_WAITING_CALLS", MOST)
    server = await _started()
    yield server
    await server.stop(0)


async def _started() -> RunningServer:
    service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, Servicer(), NAME)
    return await start([service], ["127.0.0.1:0"], auth=AnyKey())


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _stranger(port: int, sent: bytes) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def _is_closed(connection: Connection) -> None:
    """Wait until the server closes it."""
    reader, writer = connection
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1 << 16):
            pass
    writer.close()


async def _is_served(port: int) -> bool:
    """Whether a new client gets an answer. It may come while connections without a key are closed,
    and its first call has not shown one."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.CreateUpload(pb.CreateUploadRequest(), metadata=KEY)
            return True
        return False


async def test_connections_without_a_key_are_closed_while_too_many_calls_wait(
    running: RunningServer,
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=KEY)
        await watch.read()
        async with asyncio.timeout(60):
            closed = [
                asyncio.create_task(_is_closed(await _stranger(running.port, opening(256))))
                for _ in range(20)
            ]
            # Those that connect after a pause may be too few to be closed.
            await asyncio.wait(closed, return_when=asyncio.FIRST_COMPLETED)
        await stub.CreateUpload(pb.CreateUploadRequest(), metadata=KEY)
        assert not watch.done(), "the connection with a key was kept"
        for task in [watch, *closed]:
            task.cancel()


async def test_calls_that_are_never_taken_do_not_keep_new_connections_out(
    running: RunningServer,
) -> None:
    """gRPC ends malformed calls itself."""
    malformed = opening(256).replace(b":path", b":pxth")
    strangers = [await _stranger(running.port, malformed) for _ in range(8)]
    async with asyncio.timeout(60):
        while not await _is_served(running.port):
            await asyncio.sleep(0.1)
    for _, writer in strangers:
        writer.close()


async def test_connections_with_a_key_are_closed_if_more_and_more_calls_wait(
    running: RunningServer,
) -> None:
    first, *others = _streams_with_a_key()
    flooding = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(8)]
    for connection in flooding:
        connection.sendall(first)
    peers = {f"ipv4:127.0.0.1:{connection.getsockname()[1]}" for connection in flooding}
    async with asyncio.timeout(60):
        while not all(peer in running._waiting_calls._with_key for peer in peers):
            await asyncio.sleep(0.01)
    with pytest.raises(OSError):  # a connection is reset
        for stream in others:  # the event loop, which takes the calls, waits for this
            for connection in flooding:
                connection.sendall(stream)
            time.sleep(0.01)
    for connection in flooding:
        connection.close()


def _streams_with_a_key() -> Iterator[bytes]:
    """The beginning of a connection with its first stream, then each of its other streams."""
    path = f"/{NAME}/WatchAdapters"
    sent, begin = opening(256, path=path, key="acme"), len(opening(1, path=path, key="acme"))
    size = (len(sent) - begin) // 255
    yield sent[:begin]
    yield from (sent[at : at + size] for at in range(begin, len(sent), size))


async def test_connections_are_closed_while_the_process_has_no_files_left(
    running: RunningServer,
) -> None:
    connections = Connections([running.port])
    reader, writer = await _stranger(running.port, opening(1))
    await reader.readexactly(1)
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1])
    )
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        num_closed = connections.close(lambda peer: False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in taken:
            os.close(number)
        connections.release()
    assert num_closed == 1
    await _is_closed((reader, writer))


async def test_a_server_without_calls_does_not_ask_grpc_for_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer of grpcio before 1.85 is lost memory."""
    monkeypatch.setattr(waiting_calls, "_POLL_S", 0.0001)
    count, num_counts = waiting_calls.WaitingCalls._num_arrived, 0

    def counted(self: waiting_calls.WaitingCalls) -> int:
        nonlocal num_counts
        num_counts += 1
        return count(self)

    monkeypatch.setattr(waiting_calls.WaitingCalls, "_num_arrived", counted)
    server = await _started()
    async with asyncio.timeout(60):
        while not num_counts:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    await server.stop(0)
    assert num_counts < 20, "and not thousands"


def test_calls_are_counted_when_a_process_that_had_shrunk_grows_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growth, found = waiting_calls._Growth(), []
    for megabytes in (100, 80, 83, 84, 87, 88):
        monkeypatch.setattr(waiting_calls, "_resident_bytes", lambda mb=megabytes: mb << 20)
        found.append(growth.calls_for_count())
    assert found == [True, False, False, True, False, True]


async def test_a_server_starts_without_a_folder_for_its_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    server = await _started()
    assert "TMPDIR" in caplog.text
    assert await _is_served(server.port)
    await server.stop(0)


_ENDS_EARLY = """
import asyncio
from loraplex_services.common.grpc.server import start

async def main():
    await start([], ["127.0.0.1:0"])
    raise OSError("another port is taken")

asyncio.run(main())
"""


def test_a_process_that_fails_after_the_start_of_its_server_leaves_no_folder(
    tmp_path: Path,
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ENDS_EARLY],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "another port is taken" in run.stderr
    assert list(tmp_path.glob("loraplex-*")) == []
