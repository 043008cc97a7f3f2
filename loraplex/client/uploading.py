"""Uploads an adapter to the registry: sends it in chunks, and resumes after failures."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc

from loraplex.api.error_wire import STATUS_LOST
from loraplex.api.registry import MAX_ONE_CALL_BYTES
from loraplex.client.channel import CHUNK_BYTES, Channel
from loraplex.client.progress import Progress, ignore_progress
from loraplex.client.sent_files import FileChecksums, MemoryFile, SentFile
from loraplex.errors import (
    Blocked,
    InvalidRequest,
    LoraplexError,
    ResourceExhausted,
    Unavailable,
)
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Delays before the attempts after the first one."""
FINISH_TIMEOUT_S = 600.0
"""Timeout of the publication, in which the registry reads every tensor of a large adapter."""

MAX_STREAMS = 6
"""Most streams of one upload, each over a connection of its own. A registry receives eight of one
tenant at a time, and others of the tenant, such as small updates, must not wait for these."""
CONNECTION_BYTES = 512 << 10
"""Bytes that a server receives over one connection in one round trip."""
WANTED_BYTES_PER_S = 100 << 20
RANGE_BYTES = 16 << 20
"""Bytes of a file that one stream sends where several send it."""
_READ_AHEAD_CHUNKS = 8
_REFUSED_AT_ONCE = ("UNREACHABLE", "NO_BASE")
"""Reasons of a failed first attempt for which another attempt is pointless."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The bytes [begin, end) of a file."""

    file: SentFile
    begin: int
    end: int


async def upload(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[SentFile],
    checksums: Sequence[FileChecksums],
    progress: Progress = ignore_progress,
) -> pb.FinishUploadResponse | pb.PublishAdapterResponse:
    """Send the files, as `hash_files` read them, and publish them as one version.

    It is safe to repeat: an interrupted upload continues with the bytes that are missing.
    """
    if sum(file.size_bytes for file in files) <= MAX_ONE_CALL_BYTES:
        try:
            return await _publish_in_one_call(channel, options, files, checksums, progress)
        except Unavailable as error:  # A refusal whose reason was lost is refused again.
            if error.reason != STATUS_LOST:
                raise
    return await _upload_in_streams(channel, options, files, checksums, progress)


async def _upload_in_streams(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[SentFile],
    checksums: Sequence[FileChecksums],
    progress: Progress,
) -> pb.FinishUploadResponse:
    """Upload in a session, which continues after an interruption."""
    request = pb.CreateUploadRequest(options=options, files=[each.spec for each in checksums])
    crc32s = {each.spec.path: each.crc32s for each in checksums}
    session = await _open(channel, request)
    num_streams = await _num_streams(channel, files)
    pauses = iter(PAUSES_S)
    while True:
        try:
            return await _send(channel, session, files, crc32s, progress, num_streams)
        except (Unavailable, ResourceExhausted, InvalidRequest) as error:
            pause_s = next(pauses, None)
            if pause_s is None:
                raise
            # A single stream may succeed where several fail, because the tenant may have too many.
            # If one of several registries has ended, the others can still take some streams.
            is_lost = isinstance(error, Unavailable)
            if num_streams == 1 and not is_lost and not error.retry_after_s:
                raise
            num_streams = max(1, num_streams // 2) if is_lost else 1
            await asyncio.sleep(error.retry_after_s or pause_s)
        except Blocked as error:
            # A file that the registry had was garbage collected in the meantime, or there is a gap
            # after bytes that it had: it reads a stream only up to these.
            if error.reason != "UPLOAD_INCOMPLETE":
                raise
            num_before = _num_stored(session)
            with contextlib.suppress(Unavailable):
                session = await _open(channel, request)
            if _num_stored(session) <= num_before and next(pauses, None) is None:
                raise
            continue
        with contextlib.suppress(Unavailable):
            session = await _open(channel, request)


def _num_stored(session: pb.CreateUploadResponse) -> int:
    """Bytes that a session has without a gap before them."""
    return sum(each.committed_bytes for each in session.progress)


async def _publish_in_one_call(
    channel: Channel,
    options: pb.PublishOptions,
    files: Sequence[SentFile],
    checksums: Sequence[FileChecksums],
    progress: Progress,
) -> pb.PublishAdapterResponse:
    """Send a small adapter with its options."""
    is_read = all(isinstance(file, MemoryFile) for file in files)
    data = _joined(files) if is_read else await asyncio.to_thread(_joined, files)
    first = pb.PublishAdapterRequest(
        options=options,
        files=[each.spec for each in checksums],
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
    parts = []
    for file in files:
        with file.open() as content:
            parts.append(content.read(file.size_bytes))
    return b"".join(parts)


async def _open(channel: Channel, request: pb.CreateUploadRequest) -> pb.CreateUploadResponse:
    """Open a session, or find the open one for the same files, with the bytes that it already
    has."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    session: pb.CreateUploadResponse = await channel.call(stub.CreateUpload, request)
    return session


async def _num_streams(channel: Channel, files: Sequence[SentFile]) -> int:
    """The number of streams that reach the wanted rate over a line with this round-trip time."""
    most_bytes = max(file.size_bytes for file in files)
    if most_bytes <= RANGE_BYTES:
        return 1
    check: Any = channel.stub(lambda opened: opened.unary_unary("/grpc.health.v1.Health/Check"))
    round_trip_s = math.inf
    with contextlib.suppress(LoraplexError):  # a proxy may not pass it on
        for _ in range(2):
            begin_s = time.monotonic()
            await channel.call(check, b"")
            round_trip_s = min(round_trip_s, time.monotonic() - begin_s)
        wanted = math.ceil(round_trip_s * WANTED_BYTES_PER_S / CONNECTION_BYTES)
        return min(wanted, MAX_STREAMS)
    return 1


async def _send(
    channel: Channel,
    session: pb.CreateUploadResponse,
    files: Sequence[SentFile],
    crc32s: Mapping[str, Sequence[int]],
    progress: Progress,
    num_streams: int,
) -> pb.FinishUploadResponse:
    """Send the bytes that the session lacks, then publish."""
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = sum(each.committed_bytes for each in session.progress)
    progress("upload", done_bytes, total_bytes)

    def sent(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("upload", done_bytes, total_bytes)

    missing = iter(_missing(session, files, num_streams))

    async def send_some(connection: Channel) -> None:
        for each in missing:
            await _send_range(connection, session.upload_id, each, crc32s[each.file.path], sent)

    others = [channel.another() for _ in range(1, num_streams)]
    streams = [asyncio.ensure_future(send_some(each)) for each in (channel, *others)]
    try:
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for each in others:
            await each.close()
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    finish = pb.FinishUploadRequest(upload_id=session.upload_id)
    answer: pb.FinishUploadResponse = await channel.call(
        stub.FinishUpload, finish, FINISH_TIMEOUT_S
    )
    return answer


def _missing(
    session: pb.CreateUploadResponse, files: Sequence[SentFile], num_streams: int
) -> Iterator[_Range]:
    """The ranges that the session lacks. A file that comes in one stream is checked while it
    arrives. The others come in ranges that begin at the same places each time, so that a range of
    which some bytes are stored already is continued."""
    progress = {each.path: each for each in session.progress}
    for file in files:
        known = progress.get(file.path, pb.FileProgress())
        begin, size = known.committed_bytes, file.size_bytes
        if known.complete:
            continue
        if num_streams == 1 and not begin:
            yield _Range(file, 0, size)
            continue
        while begin < size:
            end = min(size, (begin // RANGE_BYTES + 1) * RANGE_BYTES)
            yield _Range(file, begin, end)
            begin = end


async def _send_range(
    channel: Channel,
    upload_id: str,
    sent_range: _Range,
    crc32s: Sequence[int],
    sent: Callable[[int], None],
) -> None:
    """Send some bytes of a file in one stream, and tell `sent` how many of them are on the way."""
    call = channel.stub(registry_pb2_grpc.RegistryServiceStub).UploadPart(metadata=channel.metadata)
    with channel.typed_errors():
        try:
            async for part, num_bytes in _parts(upload_id, sent_range, crc32s):
                await call.write(part)
                sent(num_bytes)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # The server has already ended the call; its status, below, says why.
        except BaseException:
            call.cancel()  # or the registry would wait for the rest, and keep a stream for it
            raise
        await call


async def _parts(
    upload_id: str, sent_range: _Range, crc32s: Sequence[int]
) -> AsyncIterator[tuple[pb.UploadPartRequest, int]]:
    """Yield (message, bytes in it); at least one, because the first names the file."""
    names, offset = (upload_id, sent_range.file.path), sent_range.begin
    async for chunk in _chunks(sent_range):
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


async def _chunks(sent_range: _Range) -> AsyncIterator[bytes]:
    """Yield the chunks, and read the next ones ahead."""

    def read_chunk() -> bytes:
        return content.read(min(CHUNK_BYTES, sent_range.end - content.tell()))

    def read() -> list[bytes]:
        return list(islice(iter(read_chunk, b""), _READ_AHEAD_CHUNKS))

    with sent_range.file.open() as content:
        content.seek(sent_range.begin)
        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            while current := await reading:
                reading = asyncio.ensure_future(asyncio.to_thread(read))
                for chunk in current:
                    yield chunk
        finally:
            await asyncio.wait([reading])
