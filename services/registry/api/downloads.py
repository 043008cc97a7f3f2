"""Sends the files of a version to a reader.

Bytes are verified once: by the reader if it asks to do so, which also covers the network, otherwise
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex.errors import DataLoss
from loraplex_services.common.objects import ObjectStore, read_chunks
from loraplex_services.registry import layout
from loraplex_services.registry.records import VersionRecord

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes of one file."""

    path: str
    offset: int
    data: bytes


async def chunks_of(
    store: ObjectStore,
    version: VersionRecord,
    paths: Collection[str] = (),
    *,
    reader_verifies: bool = False,
) -> AsyncIterator[Chunk]:
    """Every byte of a version, or of some of its files, file by file, in order.

    Raises:
        DataLoss: a stored file is gone, of another size than was published or, unless
            `reader_verifies`, of other bytes. What was sent of it must not be used.
    """
    for file in version.files:
        if paths and file.path not in paths:
            continue
        what = f"{file.path} of {version.digest}"
        stored = await store.head(layout.blob(file.sha256))
        if stored is None:
            raise DataLoss(f"{what} is missing from the store; upload it again")
        if stored.size != file.size:
            raise DataLoss(f"{what} is damaged in the store; upload it again")
        offset = 0
        digest = hashlib.sha256()
        async with contextlib.aclosing(_blob(store, file)) as blocks:
            async for block in blocks:
                # Not on a thread: getting the GIL back would take as long again.
                if not reader_verifies:
                    digest.update(block)
                for begin in range(0, len(block), CHUNK_BYTES):
                    data = block[begin : begin + CHUNK_BYTES]
                    yield Chunk(file.path, offset, data)
                    offset += len(data)
        if not reader_verifies and digest.hexdigest() != file.sha256:
            raise DataLoss(f"{what} is damaged in the store; upload it again")


async def _blob(store: ObjectStore, file: File) -> AsyncGenerator[bytes, None]:
    """The bytes of a file. While some are in use, the next are read."""
    blocks = read_chunks(store, layout.blob(file.sha256), 0, file.size)
    async with contextlib.aclosing(blocks):
        reading = asyncio.ensure_future(anext(blocks, b""))
        try:
            while block := await reading:
                reading = asyncio.ensure_future(anext(blocks, b""))
                yield block
        finally:
            await asyncio.wait([reading])
