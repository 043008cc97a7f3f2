"""Uploads an adapter to the registry: hashes it, sends it in chunks, and resumes after failures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import secrets
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import grpc

from loraplex.api.error_wire import STATUS_LOST
from loraplex.api.registry import MAX_ONE_CALL_BYTES
from loraplex.client.channel import CHUNK_BYTES, Channel
from loraplex.client.progress import Progress, ignore_progress
from loraplex.errors import Blocked, DataLoss, Unavailable, Unsupported
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Delays before the attempts after the first one."""
FINISH_TIMEOUT_S = 600.0
"""Timeout of the publication, in which the registry reads every tensor of a large adapter."""

_READ_AHEAD_CHUNKS = 8
_SMALL_BYTES = 64 << 10
"""Hashing this many bytes takes less time than a thread takes to start."""
_REFUSED_AT_ONCE = ("UNREACHABLE", "NO_BASE")
"""Reasons of a failed first attempt for which another attempt is pointless."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file to send."""

    path: str
    """Path within the adapter."""
    location: Path
    size_bytes: int
    sha256: str = ""
    """The sha256 that the content must have, if it is known."""

    def open(self) -> BinaryIO:
        """The content, from its start."""
        return self.location.open("rb")


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file to send whose content is in memory."""

    path: str
    """Path within the adapter."""
    content: bytes
    sha256: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def open(self) -> BinaryIO:
        """The content, from its start."""
        return io.BytesIO(self.content)


SentFile = LocalFile | MemoryFile


@dataclass(frozen=True, slots=True)
class Summed:
    """The checksums of a file that was read."""

    spec: pb.FileSpec
    crc32s: Sequence[int] = ()
    """CRC-32 of each chunk of CHUNK_BYTES, of which the last one is shorter; none if they were not
    computed."""


async def hash_files(files: Sequence[SentFile], progress: Progress) -> list[Summed]:
    """Read the files and compute their checksums; those of chunks only if they are sent in more
    than one call. Raises DataLoss if a file is damaged."""
    loop = asyncio.get_running_loop()
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    summed = []
    for file in files:

        def report(num_bytes: int, before: int = done_bytes) -> None:
            loop.call_soon_threadsafe(progress, "hash", before + num_bytes, total_bytes)

        crc32s: Sequence[int] = ()
        if _is_small(file):
            num_bytes, sha256 = _hash_file(file, report)
        elif total_bytes <= MAX_ONE_CALL_BYTES:
            num_bytes, sha256 = await asyncio.to_thread(_hash_file, file, report)
        else:
            # Nothing is being sent yet, so a second core can compute the sums of chunks without
            # delaying the upload.
            (num_bytes, sha256), crc32s = await asyncio.gather(
                asyncio.to_thread(_hash_file, file, report),
                asyncio.to_thread(_sum_chunks, file),
            )
        if file.sha256 not in ("", sha256):
            raise DataLoss(f"{file.path} is damaged, its sha256 is {sha256}")
        done_bytes += num_bytes
        summed.append(Summed(pb.FileSpec(path=file.path, size=num_bytes, sha256=sha256), crc32s))
    return summed


def _is_small(file: SentFile) -> bool:
    return isinstance(file, MemoryFile) and file.size_bytes <= _SMALL_BYTES


def _hash_file(file: SentFile, report: Callable[[int], None]) -> tuple[int, str]:
    """Size in bytes and sha256."""
    digest = hashlib.sha256()
    num_bytes = 0
    with file.open() as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            report(num_bytes)
    return num_bytes, digest.hexdigest()


def _sum_chunks(file: SentFile) -> list[int]:
    with file.open() as content:
        return [zlib.crc32(chunk) for chunk in iter(lambda: content.read(CHUNK_BYTES), b"")]


async def upload(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[SentFile],
    summed: Sequence[Summed],
    progress: Progress = ignore_progress,
) -> pb.FinishUploadResponse | pb.PublishAdapterResponse:
    """Send the files, as `hash_files` read them, and publish them as one version.

    It is safe to repeat: an interrupted upload continues with the bytes that are missing.
    """
    if sum(file.size_bytes for file in files) <= MAX_ONE_CALL_BYTES:
        # An older registry does not know the call. What is unsupported otherwise is refused again,
        # and so is what was refused for a reason that was lost.
        try:
            return await _publish_in_one_call(channel, options, files, summed, progress)
        except Unsupported:
            pass
        except Unavailable as error:
            if error.reason != STATUS_LOST:
                raise
    request = pb.CreateUploadRequest(options=options, files=[each.spec for each in summed])
    crc32s = {each.spec.path: each.crc32s for each in summed}
    session = await _open(channel, request)
    for pause_s in PAUSES_S:
        try:
            return await _send(channel, session, files, crc32s, progress)
        except Unavailable as error:
            await asyncio.sleep(error.retry_after_s or pause_s)
        except Blocked as error:
            # A file that the registry had was garbage collected in the meantime: open the upload
            # again and send it.
            if error.reason != "UPLOAD_INCOMPLETE":
                raise
        with contextlib.suppress(Unavailable):
            session = await _open(channel, request)
    return await _send(channel, session, files, crc32s, progress)


async def _publish_in_one_call(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[SentFile],
    summed: Sequence[Summed],
    progress: Progress,
) -> pb.PublishAdapterResponse:
    """Send a small adapter with its options."""
    is_read = all(isinstance(file, MemoryFile) for file in files)
    data = _joined(files) if is_read else await asyncio.to_thread(_joined, files)
    first = pb.PublishAdapterRequest(
        options=options,
        files=[each.spec for each in summed],
        request_id=secrets.token_hex(8),
        data=data[:CHUNK_BYTES],
    )
    rest = range(CHUNK_BYTES, len(data), CHUNK_BYTES)
    parts = [pb.PublishAdapterRequest(data=data[i : i + CHUNK_BYTES]) for i in rest]
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)

    async def send() -> pb.PublishAdapterResponse:
        progress("upload", 0, len(data))
        messages = iter([first, *parts])
        answer: pb.PublishAdapterResponse = await channel.call(
            stub.PublishAdapter, messages, FINISH_TIMEOUT_S
        )
        progress("upload", len(data), len(data))
        return answer

    for attempt, pause_s in enumerate(PAUSES_S):
        try:
            return await send()
        except Unavailable as error:
            if error.reason == STATUS_LOST or (not attempt and error.reason in _REFUSED_AT_ONCE):
                raise
            await asyncio.sleep(error.retry_after_s or pause_s)
    return await send()


def _joined(files: Sequence[SentFile]) -> bytes:
    """The bytes of all files, one after another."""
    return b"".join(
        file.content if isinstance(file, MemoryFile) else file.location.read_bytes()
        for file in files
    )


async def _open(channel: Channel, request: pb.CreateUploadRequest) -> pb.CreateUploadResponse:
    """Open a session, or find the open one for the same files, with the bytes that it already
    has."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    session: pb.CreateUploadResponse = await channel.call(stub.CreateUpload, request)
    return session


async def _send(
    channel: Channel,
    session: pb.CreateUploadResponse,
    files: Sequence[SentFile],
    crc32s: Mapping[str, Sequence[int]],
    progress: Progress,
) -> pb.FinishUploadResponse:
    """Send the bytes that the session lacks, then publish."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    total_bytes = sum(file.size_bytes for file in files)
    committed = {p.path: p.committed_bytes for p in session.progress}
    complete = {p.path for p in session.progress if p.complete}
    done_bytes = sum(committed.values())
    progress("upload", done_bytes, total_bytes)
    for file in files:
        if file.path in complete:
            continue
        call = stub.UploadPart(metadata=channel.metadata)
        with channel.typed_errors():
            try:
                begin = committed.get(file.path, 0)
                parts = _parts(session.upload_id, file, begin, crc32s[file.path])
                async for part, num_bytes in parts:
                    await call.write(part)
                    done_bytes += num_bytes
                    progress("upload", done_bytes, total_bytes)
                await call.done_writing()
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass  # The server has already ended the call; its status, below, says why.
            await call
    finish = pb.FinishUploadRequest(upload_id=session.upload_id)
    answer: pb.FinishUploadResponse = await channel.call(
        stub.FinishUpload, finish, FINISH_TIMEOUT_S
    )
    return answer


async def _parts(
    upload_id: str, file: SentFile, offset: int, crc32s: Sequence[int]
) -> AsyncIterator[tuple[pb.UploadPartRequest, int]]:
    """Yield (message, bytes in it) from `offset` on; at least one, because the first names the
    file."""
    names = upload_id, file.path
    async for chunk in _chunks(file, offset):
        index, inside = divmod(offset, CHUNK_BYTES)
        crc32 = zlib.crc32(chunk) if inside or index >= len(crc32s) else crc32s[index]
        part = pb.UploadPartRequest(
            upload_id=names[0], path=names[1], offset=offset, data=chunk, crc32=crc32
        )
        yield part, len(chunk)
        offset += len(chunk)
        names = "", ""
    if names[0]:
        yield pb.UploadPartRequest(upload_id=names[0], path=names[1], offset=offset), 0


async def _chunks(file: SentFile, offset: int) -> AsyncIterator[bytes]:
    """Yield the chunks from `offset` on, and read the next ones ahead."""

    def read() -> list[bytes]:
        chunks = iter(lambda: content.read(CHUNK_BYTES), b"")
        return list(islice(chunks, _READ_AHEAD_CHUNKS))

    with file.open() as content:
        content.seek(offset)
        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            while current := await reading:
                reading = asyncio.ensure_future(asyncio.to_thread(read))
                for chunk in current:
                    yield chunk
        finally:
            await asyncio.wait([reading])
