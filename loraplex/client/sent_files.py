"""Files to send, on the disk or in memory, and their checksums."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraplex.api.registry import MAX_ONE_CALL_BYTES
from loraplex.client.channel import CHUNK_BYTES
from loraplex.client.progress import Progress
from loraplex.errors import DataLoss
from loraplex.v1 import registry_pb2 as pb

_SMALL_BYTES = 64 << 10
"""Hashing this many bytes takes less time than a thread takes to start."""


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
        """The content, from its start.

        Raises:
            DataLoss: it has been deleted, or replaced by a link, which may lead to any file.
        """
        try:
            return open(self.location, "rb", opener=_without_links)
        except OSError as error:
            why = "it has changed since its folder was listed"
            raise DataLoss(f"{self.path} cannot be read: {error.strerror}; {why}") from None


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


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """The checksums of a file that was read."""

    spec: pb.FileSpec
    crc32s: Sequence[int] = ()
    """CRC-32 of each chunk of CHUNK_BYTES, of which the last one is shorter; none if they were not
    computed."""


async def hash_files(files: Sequence[SentFile], progress: Progress) -> list[FileChecksums]:
    """Read the files and compute their checksums; those of chunks only if they are sent in more
    than one call. Raises DataLoss if a file is damaged."""
    loop = asyncio.get_running_loop()
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    checksums = []
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
            raise DataLoss(f"{file.path} is damaged: its sha256 is {sha256}; fetch it again")
        done_bytes += num_bytes
        checksums.append(
            FileChecksums(pb.FileSpec(path=file.path, size=num_bytes, sha256=sha256), crc32s)
        )
    return checksums


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
