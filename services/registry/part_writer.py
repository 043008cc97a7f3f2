"""Writing the bytes of one stream into the object store as parts of an upload."""

from __future__ import annotations

import asyncio
import hashlib
import zlib

from loraplex.errors import DataLoss
from services.common.objects import ObjectStore
from services.registry import layout
from services.registry.failpoint import failpoint
from services.registry.scanning import ArrivingScan

MAX_PART_BYTES = 256 << 20
"""What a lost registry costs at most in bytes to send again."""


class PartWriter:
    """Writes the bytes of one stream as parts of limited size.

    A chunk is checked, hashed and written while the next one is on its way.
    """

    def __init__(
        self,
        store: ObjectStore,
        upload_id: str,
        index: int,
        begin: int,
        scan: ArrivingScan | None,
    ) -> None:
        self.end = begin
        self._scan = scan
        self._store = store
        self._place = (upload_id, index)
        self._open()

    def _open(self) -> None:
        self._begin = self.end
        self._writer = self._store.writer()
        self._sha256 = hashlib.sha256()
        self._working: asyncio.Future[None] | None = None

    async def write(self, data: bytes, crc32: int) -> None:
        """Take a chunk. Raises DataLoss where this one, or the one before, is damaged."""
        await self._settle()
        if self.end - self._begin >= MAX_PART_BYTES:
            await self.finish()
            self._open()
        self.end += len(data)
        self._working = asyncio.ensure_future(self._work(data, crc32))

    async def finish(self) -> None:
        """Commit what was written, if anything, and all of it was whole."""
        try:
            await self._settle()
            size = self.end - self._begin
            if size:
                sha256 = self._sha256.hexdigest()
                key = layout.upload_part(*self._place, self._begin, size, sha256)
                await self._writer.commit(key)
                failpoint("upload.part")
        finally:
            await self._writer.abort()

    async def _work(self, data: bytes, crc32: int) -> None:
        def check_and_hash() -> None:
            check_chunk(data, crc32)
            self._sha256.update(data)
            if self._scan is not None:
                self._scan.feed(data)

        await asyncio.gather(asyncio.to_thread(check_and_hash), self._writer.write(data))

    async def _settle(self) -> None:
        if self._working is not None:
            await self._working


def check_chunk(data: bytes, crc32: int) -> None:
    """Raises DataLoss where `data` is not what its sender summed up."""
    if zlib.crc32(data) != crc32:
        raise DataLoss("a chunk does not match its crc32: it was damaged on the way; send it again")
