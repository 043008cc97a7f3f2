"""Uploads that break continue with the bytes that are missing, and no more."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.client.channel import CHUNK_BYTES, Channel
from loraplex.client.progress import ignore_progress
from loraplex.client.sent_files import LocalFile, hash_files
from loraplex.client.settings import Credentials
from loraplex.client.uploading import PAUSES_S, upload
from loraplex.errors import InvalidAdapter, LoraplexError, Unavailable
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1.registry_pb2_grpc import RegistryServiceStub
from tests.sdk.servers import FlakyRegistry, serving

OPTIONS = pb.PublishOptions(name="a")


@pytest.fixture
def files(tmp_path: Path) -> list[LocalFile]:
    """A small file and one of five chunks and a bit, too large for one call."""
    return _files(tmp_path, 5 * CHUNK_BYTES + 17)


@pytest.fixture
def small_files(tmp_path: Path) -> list[LocalFile]:
    """A small file and one of two chunks."""
    return _files(tmp_path, 2 * CHUNK_BYTES)


def _files(folder: Path, num_bytes: int) -> list[LocalFile]:
    sizes = {"adapter_config.json": 100, "adapter_model.safetensors": num_bytes}
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return [LocalFile(name, folder / name, size) for name, size in sizes.items()]


async def _upload(servicer: FlakyRegistry, files: list[LocalFile]) -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    async with serving(servicer) as address:
        channel = Channel(address, Credentials(), "registry")
        try:

            def progress(*step: Any) -> None:
                seen.append(step)

            summed = await hash_files(files, progress)
            await upload(channel, OPTIONS, files, summed, progress)
        finally:
            await channel.close()
    return seen


async def test_sends_every_byte_once_and_reports_progress(files: list[LocalFile]) -> None:
    servicer = FlakyRegistry()
    seen = await _upload(servicer, files)
    for file in files:
        assert servicer.stored[file.path] == file.location.read_bytes()
    total_bytes = sum(file.size_bytes for file in files)
    assert seen[-1] == ("upload", total_bytes, total_bytes)
    assert [done for phase, done, _ in seen if phase == "upload"] == sorted(
        done for phase, done, _ in seen if phase == "upload"
    )


async def test_continues_after_a_broken_stream_where_the_server_has_it(
    files: list[LocalFile],
) -> None:
    servicer = FlakyRegistry(num_breaks=2, break_at=CHUNK_BYTES)
    await _upload(servicer, files)
    assert servicer.stored[files[1].path] == files[1].location.read_bytes()
    resumed = [offset for offset in servicer.offsets if offset > 0]
    assert len(resumed) == 2
    assert all(offset % CHUNK_BYTES == 0 for offset in resumed)


async def test_continues_within_a_chunk_where_the_server_has_part_of_one(
    files: list[LocalFile],
) -> None:
    servicer = FlakyRegistry()
    servicer.stored[files[1].path] = bytearray(files[1].location.read_bytes()[:1000])
    await _upload(servicer, files)
    assert servicer.stored[files[1].path] == files[1].location.read_bytes()
    assert servicer.offsets == [0, 1000]


async def test_gives_up_after_its_attempts(files: list[LocalFile]) -> None:
    servicer = FlakyRegistry(num_breaks=100, break_at=0)
    with pytest.raises(Unavailable):
        await _upload(servicer, files)
    assert 100 - servicer.num_breaks == len(PAUSES_S) + 1


async def test_refusal_is_not_repeated(files: list[LocalFile]) -> None:
    class Refusing(FlakyRegistry):
        finished = 0

        async def FinishUpload(self, request: object, context: object) -> pb.FinishUploadResponse:
            self.finished += 1
            raise InvalidAdapter("no", violations=[])

    servicer = Refusing()
    with pytest.raises(InvalidAdapter):
        await _upload(servicer, files)
    assert servicer.finished == 1


async def test_nobody_there_fails_at_once_naming_the_address(files: list[LocalFile]) -> None:
    channel = Channel("127.0.0.1:1", Credentials(), "registry")
    with pytest.raises(LoraplexError) as caught:
        await upload(channel, OPTIONS, files, await hash_files(files, ignore_progress))
    assert caught.value.reason == "UNREACHABLE"
    assert "127.0.0.1:1" in caught.value.message
    await channel.close()


async def test_who_calls_a_server_with_tls_in_plain_is_told_of_the_flag() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the beginning of HTTP/2, as a server with TLS does, and close."""
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = Channel(f"127.0.0.1:{port}", Credentials(), "registry")
    async with server:
        with pytest.raises(Unavailable, match="If it uses TLS, name its CA with --ca"):
            await channel.call(channel.stub(RegistryServiceStub).ListBases, pb.ListBasesRequest())
    await channel.close()


async def test_a_small_adapter_is_sent_in_one_call_which_is_repeated_with_the_same_id(
    small_files: list[LocalFile],
) -> None:
    class InOneCall(FlakyRegistry):
        def __init__(self) -> None:
            super().__init__(num_breaks=1)
            self.request_ids: list[str] = []

        async def PublishAdapter(
            self, request_iterator: AsyncIterator[pb.PublishAdapterRequest], context: object
        ) -> pb.PublishAdapterResponse:
            parts = [part async for part in request_iterator]
            self.request_ids.append(parts[0].request_id)
            data = b"".join(part.data for part in parts)
            for spec in parts[0].files:
                self.stored[spec.path], data = bytearray(data[: spec.size]), data[spec.size :]
            if self.num_breaks:
                self.num_breaks -= 1
                raise Unavailable("going away", retry_after_s=0.01)
            return pb.PublishAdapterResponse(created=True)

    servicer = InOneCall()
    seen = await _upload(servicer, small_files)
    for file in small_files:
        assert servicer.stored[file.path] == file.location.read_bytes()
    first, second = servicer.request_ids
    assert first == second
    assert servicer.offsets == []
    assert seen[-1][1] == seen[-1][2] == sum(file.size_bytes for file in small_files)


async def test_a_small_adapter_whose_refusal_is_lost_is_sent_in_parts(
    small_files: list[LocalFile],
) -> None:
    class LosesItsReason(FlakyRegistry):
        num_calls = 0

        async def PublishAdapter(
            self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]
        ) -> pb.PublishAdapterResponse:
            self.num_calls += 1
            await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
            raise AssertionError

    servicer = LosesItsReason()
    await _upload(servicer, small_files)
    assert servicer.num_calls == 1
    for file in small_files:
        assert servicer.stored[file.path] == file.location.read_bytes()


async def test_declares_size_and_sha256_of_each_file(files: list[LocalFile]) -> None:
    summed = await hash_files(files, ignore_progress)
    for each, file in zip(summed, files, strict=True):
        content, spec = file.location.read_bytes(), each.spec
        assert (spec.size, spec.sha256) == (len(content), hashlib.sha256(content).hexdigest())
