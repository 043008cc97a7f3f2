"""Sending the files of a version to a reader, checked on the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex.errors import DataLoss
from services.common.objects import ObjectMissing, ObjectStore, read_chunks
from services.registry import layout
from services.registry.records import VersionRecord

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes of one file."""

    path: str
    offset: int
    data: bytes


async def chunks_of(
    store: ObjectStore, version: VersionRecord, paths: Collection[str] = ()
) -> AsyncIterator[Chunk]:
    """Every byte of a version, or of some of its files, file by file, in order.

    Raises:
        DataLoss: stored bytes are gone or not those that were published. What was sent of that
            file must not be used.
    """
    for file in version.files:
        if paths and file.path not in paths:
            continue
        digest = hashlib.sha256()
        offset = 0
        try:
            async for data in _hashed(store, file, digest):
                for begin in range(0, len(data), CHUNK_BYTES):
                    piece = data[begin : begin + CHUNK_BYTES]
                    yield Chunk(file.path, offset, piece)
                    offset += len(piece)
        except ObjectMissing:
            raise DataLoss(f"{file.path} of {version.digest} is gone from the store") from None
        if digest.hexdigest() != file.sha256:
            raise DataLoss(f"{file.path} of {version.digest} is damaged in the store")


async def _hashed(store: ObjectStore, file: File, digest: hashlib._Hash) -> AsyncIterator[bytes]:
    """The bytes of a blob. While some are in use, they are hashed and the next are read."""
    data = b""
    async with contextlib.aclosing(
        read_chunks(store, layout.blob(file.sha256), 0, file.size)
    ) as chunks:
        while True:
            hashing = asyncio.ensure_future(asyncio.to_thread(digest.update, data))
            reading = asyncio.ensure_future(anext(chunks, b""))
            try:
                if data:
                    yield data
            finally:
                await asyncio.wait([hashing, reading])
            data = reading.result()
            if not data:
                return
