"""Sending an adapter to the registry: hashed first, in chunks, resumed where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import grpc

from loraplex.channel import CHUNK_BYTES, Channel
from loraplex.chunk_wire import ChunkStub, Part
from loraplex.errors import Blocked, DataLoss, Unavailable
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Before each new attempt after the first."""
FINISH_TIMEOUT_S = 600.0
"""Validation reads every tensor of a large adapter."""

_READ_AHEAD_CHUNKS = 2

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all); phase is "hash", "upload" or "download"."""


def ignore_progress(phase: str, done_bytes: int, total_bytes: int) -> None:
    """For callers whom nobody watches."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file to send."""

    path: str
    """Path within the adapter."""
    location: Path
    size_bytes: int
    sha256: str = ""
    """What the content must hash to, where that is known."""


async def hash_files(files: Sequence[LocalFile], progress: Progress) -> list[pb.FileSpec]:
    """The declared form of the files: path, size and sha256."""
    loop = asyncio.get_running_loop()
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    specs = []
    for file in files:

        def report(num_bytes: int, before: int = done_bytes) -> None:
            loop.call_soon_threadsafe(progress, "hash", before + num_bytes, total_bytes)

        num_bytes, sha256 = await asyncio.to_thread(_hash_file, file.location, report)
        if file.sha256 not in ("", sha256):
            raise DataLoss(f"{file.path}: {file.location} is damaged, its sha256 is {sha256}")
        done_bytes += num_bytes
        specs.append(pb.FileSpec(path=file.path, size=num_bytes, sha256=sha256))
    return specs


def _hash_file(path: Path, report: Callable[[int], None]) -> tuple[int, str]:
    """Size in bytes and sha256."""
    digest = hashlib.sha256()
    num_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
            report(num_bytes)
    return num_bytes, digest.hexdigest()


async def upload(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[LocalFile],
    specs: Sequence[pb.FileSpec],
    progress: Progress = ignore_progress,
) -> pb.FinishUploadResponse:
    """Send the files, declared by `specs`, and publish them as one version.

    Safe to repeat: an upload cut short, by either side, continues with the bytes that are missing.
    """
    request = pb.CreateUploadRequest(options=options, files=specs)
    session = await _open(channel, request)
    for pause_s in PAUSES_S:
        try:
            return await _send(channel, session, files, progress)
        except Unavailable as error:
            await asyncio.sleep(error.retry_after_s or pause_s)
        except Blocked as error:
            # A file that need not be sent was collected meanwhile: open again and send it.
            if error.reason != "UPLOAD_INCOMPLETE":
                raise
        with contextlib.suppress(Unavailable):
            session = await _open(channel, request)
    return await _send(channel, session, files, progress)


async def _open(channel: Channel, request: pb.CreateUploadRequest) -> pb.CreateUploadResponse:
    """A new session, or the open one for the same files with what it already has."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    session: pb.CreateUploadResponse = await channel.call(stub.CreateUpload, request)
    return session


async def _send(
    channel: Channel,
    session: pb.CreateUploadResponse,
    files: Sequence[LocalFile],
    progress: Progress,
) -> pb.FinishUploadResponse:
    """Send the bytes that the session lacks, then publish."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    chunks = channel.stub(ChunkStub)
    total_bytes = sum(file.size_bytes for file in files)
    committed = {p.path: p.committed_bytes for p in session.progress}
    complete = {p.path for p in session.progress if p.complete}
    done_bytes = sum(committed.values())
    progress("upload", done_bytes, total_bytes)
    for file in files:
        if file.path in complete:
            continue
        call = chunks.upload(metadata=channel.metadata)
        with channel.typed_errors():
            try:
                async for part in _parts(session.upload_id, file, committed.get(file.path, 0)):
                    await call.write(part)
                    done_bytes += len(part.data)
                    progress("upload", done_bytes, total_bytes)
                await call.done_writing()
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass  # The server has ended the call already: its status, below, says why.
            await call
    finish = pb.FinishUploadRequest(upload_id=session.upload_id)
    answer: pb.FinishUploadResponse = await channel.call(
        stub.FinishUpload, finish, FINISH_TIMEOUT_S
    )
    return answer


async def _parts(upload_id: str, file: LocalFile, offset: int) -> AsyncIterator[Part]:
    """Chunks from `offset` on; at least one message, as it names the file."""
    head = pb.UploadPartRequest(upload_id=upload_id, path=file.path, offset=offset)
    async for chunk, crc32 in _chunks(file.location, offset):
        head.crc32 = crc32
        yield Part(head, chunk)
        offset += len(chunk)
        head = pb.UploadPartRequest(offset=offset)
    if head.upload_id:
        yield Part(head, b"")


async def _chunks(path: Path, offset: int) -> AsyncIterator[tuple[bytes, int]]:
    """(chunk, its crc32) from `offset` on. The next ones are read while some are in use."""

    def read() -> list[bytes]:
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        return list(islice(chunks, _READ_AHEAD_CHUNKS))

    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            while current := await reading:
                reading = asyncio.ensure_future(asyncio.to_thread(read))
                for chunk in current:
                    yield chunk, zlib.crc32(chunk)
        finally:
            await asyncio.wait([reading])
