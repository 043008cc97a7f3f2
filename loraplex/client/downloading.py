"""Downloads an adapter from the registry into a folder, and verifies every byte."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from loraplex.api.registry import AdapterFile, AdapterVersion
from loraplex.api.registry_wire import adapter_version
from loraplex.client.channel import Channel
from loraplex.client.progress import Progress, ignore_progress
from loraplex.errors import AlreadyExists, DataLoss, InvalidRequest
from loraplex.new_folder import make_partial, move_into
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

MAX_READ_BYTES = 1 << 20
"""Largest size of a file that is read into memory."""
_BATCH_BYTES = 2 << 20
"""Number of bytes that a thread writes at a time."""
_SYNC_BYTES = 16 << 20
"""Number of bytes after which a file is synced, so that the disk works while the rest arrives."""


class ReceivedFile:
    """A file that is being received: its bytes are counted, hashed and written."""

    def __init__(self, folder: Path, declared: AdapterFile) -> None:
        self._declared = declared
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        path = folder / _safe(declared.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("xb")

    def take(self, offset: int, data: bytes) -> None:
        """Count and hash `data`, which must continue at `offset`. Raises DataLoss on a gap."""
        if offset != self._num_bytes:
            raise DataLoss(f"{self._declared.path}: bytes are missing at {self._num_bytes}")
        self._digest.update(data)
        self._num_bytes += len(data)

    def check(self) -> None:
        """Raises DataLoss unless size and sha256 are as declared."""
        got = (self._num_bytes, self._digest.hexdigest())
        if got != (self._declared.size_bytes, self._declared.sha256):
            raise DataLoss(
                f"{self._declared.path}: received {got[0]} bytes with sha256 {got[1]}, expected "
                f"{self._declared.size_bytes} bytes with {self._declared.sha256}"
            )

    def write(self, data: bytes) -> None:
        """Append the received bytes to the file."""
        self._file.write(data)

    def sync(self) -> None:
        """Sync the written bytes to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, whether it is complete or not."""
        self._file.close()


class ReceivedFiles:
    """All files of a version that is being received. Bytes are hashed on arrival; threads write and
    sync them in batches while more arrive.
    """

    def __init__(self, folder: Path, declared: Sequence[AdapterFile]) -> None:
        self._files = {file.path: ReceivedFile(folder, file) for file in declared}
        self._batch: list[tuple[ReceivedFile, bytes]] = []
        self._batch_bytes = 0
        self._unsynced_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._syncing: asyncio.Future[None] | None = None

    async def take(self, chunk: pb.FileChunk) -> int:
        """Append a chunk to its file; returns its size. Raises DataLoss if there is a gap, or if
        the file was not declared.
        """
        file = self._files.get(chunk.path)
        if file is None:
            raise DataLoss(f"the registry sent a file that is not listed: {chunk.path!r}")
        data = chunk.data  # Each access to the field copies it.
        file.take(chunk.offset, data)
        self._batch.append((file, data))
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            await self._pass_on()
            if self._unsynced_bytes >= _SYNC_BYTES and _is_done(self._syncing):
                await _result(self._syncing)
                self._syncing = asyncio.ensure_future(asyncio.to_thread(file.sync))
                self._unsynced_bytes = 0
        return len(data)

    async def finish(self) -> None:
        """Sync every file to the disk. Raises DataLoss unless all are complete and match their
        digests."""
        await self._pass_on()
        for file in self._files.values():
            file.check()
        await _result(self._writing)
        await _result(self._syncing)
        for file in self._files.values():
            await asyncio.to_thread(file.sync)

    async def close(self) -> None:
        """Close every file, whether it is complete or not."""
        running = [work for work in (self._writing, self._syncing) if work is not None]
        if running:
            await asyncio.wait(running)
        for file in self._files.values():
            file.close()

    async def _pass_on(self) -> None:
        """Write the batch on a thread while the next one is received."""
        await _result(self._writing)
        batch, self._batch = self._batch, []
        self._unsynced_bytes += self._batch_bytes
        self._batch_bytes = 0
        self._writing = asyncio.ensure_future(asyncio.to_thread(_write, batch))


def _write(batch: Sequence[tuple[ReceivedFile, bytes]]) -> None:
    for file, data in batch:
        file.write(data)


def _is_done(work: asyncio.Future[None] | None) -> bool:
    return work is None or work.done()


async def _result(work: asyncio.Future[None] | None) -> None:
    """Wait for a thread's work, and raise its error if it failed."""
    if work is not None:
        await work


async def download(
    channel: Channel,
    ref: str,
    folder: Path,
    *,
    force: bool = False,
    progress: Progress = ignore_progress,
    finish: Callable[[Path, AdapterVersion], None] | None = None,
) -> AdapterVersion:
    """Put the files of a version into `folder`.

    A new folder appears complete or not at all. With `force`, files of the same names in an
    existing folder are replaced, and others are left unchanged.

    Args:
        finish: called with the folder of received files before it appears.

    Raises:
        InvalidRequest: `folder` is a file.
        AlreadyExists: the folder is not empty and `force` is not given.
        DataLoss: bytes do not match their digest. Nothing is written then.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest.field("DIR", str(folder), "is a file; name a folder")
    if not force and folder.is_dir() and any(folder.iterdir()):
        force_too = "" if finish else ", or add --force to replace files in it"
        raise AlreadyExists(f"{folder} is not empty; name a new folder{force_too}")
    partial = make_partial(folder)
    try:
        version = await _receive(channel, ref, partial, progress)
        if finish is not None:
            await asyncio.to_thread(finish, partial, version)
        await asyncio.to_thread(move_into, partial, folder)
        return version
    finally:
        shutil.rmtree(partial, ignore_errors=True)


async def read_file(channel: Channel, ref: str, path: str) -> bytes:
    """Read one small file of a version. Raises DataLoss if it is not what was published."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    content, sha256 = bytearray(), ""
    request = pb.DownloadAdapterRequest(ref=ref, paths=[path], reader_verifies=True)
    responses = channel.stream(stub.DownloadAdapter, request)
    async with contextlib.aclosing(responses):
        async for message in responses:
            if message.WhichOneof("part") == "version":
                sha256 = next((f.sha256 for f in message.version.files if f.path == path), "")
                continue
            content += message.chunk.data
            if len(content) > MAX_READ_BYTES:
                raise DataLoss(f"{path} is larger than {MAX_READ_BYTES} bytes")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataLoss(f"{path} of {ref} is not what was published; try again")
    return bytes(content)


async def _receive(channel: Channel, ref: str, folder: Path, progress: Progress) -> AdapterVersion:
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    request = pb.DownloadAdapterRequest(ref=ref, reader_verifies=True)
    responses = channel.stream(stub.DownloadAdapter, request)
    async with contextlib.aclosing(responses):
        first = await anext(responses, pb.DownloadAdapterResponse())
        if first.WhichOneof("part") != "version":
            raise DataLoss("the registry sent no version record")
        version = adapter_version(first.version)
        received = ReceivedFiles(folder, version.files)
        done_bytes = 0
        try:
            async for response in responses:
                done_bytes += await received.take(response.chunk)
                progress("download", done_bytes, version.size_bytes)
            await received.finish()
        finally:
            await received.close()
    return version


def _safe(path: str) -> PurePosixPath:
    """The path that a server sent. Raises DataLoss unless it is relative and stays inside the
    folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path:
        raise DataLoss(f"the registry sent an unsafe path: {path!r}")
    return parts
