"""Fetching an adapter from the registry into a folder, every byte checked before it counts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from loraplex.channel import Channel
from loraplex.decoding import adapter_version
from loraplex.errors import AlreadyExists, DataLoss, InvalidRequest
from loraplex.types import AdapterFile, AdapterVersion
from loraplex.uploading import Progress, ignore_progress
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc


class ReceivedFile:
    """One file while it arrives: written, counted and hashed."""

    def __init__(self, folder: Path, declared: AdapterFile) -> None:
        self._declared = declared
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        path = folder / _safe(declared.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("xb")

    def write(self, offset: int, data: bytes) -> None:
        """Append `data`, which must continue at `offset`. Raises DataLoss on a gap."""
        if offset != self._num_bytes:
            raise DataLoss(f"{self._declared.path}: bytes are missing at {self._num_bytes}")
        self._file.write(data)
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

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()


class ReceivedFiles:
    """All files of a version while they arrive."""

    def __init__(self, folder: Path, declared: Sequence[AdapterFile]) -> None:
        self._files = {file.path: ReceivedFile(folder, file) for file in declared}

    def write(self, chunk: pb.FileChunk) -> None:
        """Append a chunk to its file. Raises DataLoss for files that were not declared."""
        if chunk.path not in self._files:
            raise DataLoss(f"the registry sent a file that is not listed: {chunk.path!r}")
        self._files[chunk.path].write(chunk.offset, chunk.data)

    def check(self) -> None:
        """Raises DataLoss unless every file is whole and true."""
        for file in self._files.values():
            file.check()

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()


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
    existing one are replaced and others left alone.

    Args:
        finish: what to do with the folder of received files before it appears.

    Raises:
        AlreadyExists: the folder is not empty and `force` is not given.
        DataLoss: bytes do not match their digest; nothing is written then.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest.field("DIR", str(folder), "is a file; name a folder")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise AlreadyExists(f"{folder} is not empty; add --force to replace files in it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        version = await _receive(channel, ref, partial, progress)
        if finish is not None:
            await asyncio.to_thread(finish, partial, version)
        await asyncio.to_thread(_move_into, partial, folder)
        return version
    finally:
        shutil.rmtree(partial, ignore_errors=True)


async def read_file(channel: Channel, ref: str, path: str, max_bytes: int = 1 << 20) -> bytes:
    """One small file of a version."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    content = bytearray()
    responses = channel.stream(stub.DownloadAdapter, pb.DownloadAdapterRequest(ref=ref))
    async with contextlib.aclosing(responses):
        async for message in responses:
            if message.WhichOneof("part") == "chunk" and message.chunk.path == path:
                content += message.chunk.data
                if len(content) > max_bytes:
                    raise DataLoss(f"{path} is larger than {max_bytes} bytes")
            elif content:
                break
    return bytes(content)


async def _receive(channel: Channel, ref: str, folder: Path, progress: Progress) -> AdapterVersion:
    """Chunks are written and hashed on a thread while the next one travels."""
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    responses = channel.stream(stub.DownloadAdapter, pb.DownloadAdapterRequest(ref=ref))
    async with contextlib.aclosing(responses):
        first = await anext(responses, pb.DownloadAdapterResponse())
        if first.WhichOneof("part") != "version":
            raise DataLoss("the registry sent no version record")
        version = adapter_version(first.version)
        received = ReceivedFiles(folder, version.files)
        writing = asyncio.ensure_future(asyncio.sleep(0))
        done_bytes = 0
        try:
            async for message in responses:
                await writing
                writing = asyncio.ensure_future(asyncio.to_thread(received.write, message.chunk))
                done_bytes += len(message.chunk.data)
                progress("download", done_bytes, version.size_bytes)
            await writing
            received.check()
        finally:
            await asyncio.wait([writing])
            received.close()
    return version


def _safe(path: str) -> PurePosixPath:
    """A relative path that stays inside its folder, whatever a server says."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path:
        raise DataLoss(f"the registry sent an unsafe path: {path!r}")
    return parts


def _move_into(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`, or its files into it where it exists with content."""
    partial.chmod(0o755)
    try:
        os.rename(partial, folder)
    except OSError:
        for source in [path for path in partial.rglob("*") if path.is_file()]:
            target = folder / source.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
