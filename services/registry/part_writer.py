"""Writing the bytes of one stream into the object store as parts of an upload."""

from __future__ import annotations

import asyncio
import hashlib
import zlib

from loraplex.chunk_wire import Data
from loraplex.errors import DataLoss
from services.common.objects import ObjectStore
from services.registry import layout
from services.registry.failpoint import failpoint
from services.registry.scanning import ArrivingScan

MAX_PART_BYTES = 256 << 20
"""What a lost registry costs at most in bytes to send again."""
_BATCH_BYTES = 2 << 20
"""Written at a time, on a thread."""


class PartWriter:
    """Writes the bytes of one stream as parts of limited size.

    Chunks are checked and hashed at once, a millisecond for 1 MiB: a thread would take as long
    again to get Python's lock for each. They are written in batches while the next ones arrive.
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
        self._batch: list[Data] = []
        self._batch_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def write(self, data: Data, crc32: int) -> None:
        """Take a chunk. Raises DataLoss where it is damaged; those before it are kept."""
        if self.end - self._begin >= MAX_PART_BYTES:
            await self.finish()
            self._open()
        check_chunk(data, crc32)
        self._sha256.update(data)
        if self._scan is not None:
            self._scan.feed(data)
        self.end += len(data)
        self._batch.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            await self._pass_on()

    async def finish(self) -> None:
        """Commit what was written, if anything."""
        try:
            await self._pass_on()
            await self._written()
            size = self.end - self._begin
            if size:
                sha256 = self._sha256.hexdigest()
                key = layout.upload_part(*self._place, self._begin, size, sha256)
                await self._writer.commit(key)
                failpoint("upload.part")
        finally:
            await self._writer.abort()

    async def _pass_on(self) -> None:
        """Have the batch written while the next one gathers."""
        await self._written()
        batch, self._batch, self._batch_bytes = b"".join(self._batch), [], 0
        self._writing = asyncio.ensure_future(self._writer.write(batch))

    async def _written(self) -> None:
        if self._writing is not None:
            await self._writing


def check_chunk(data: Data, crc32: int) -> None:
    """Raises DataLoss where `data` is not what its sender summed up."""
    if zlib.crc32(data) != crc32:
        raise DataLoss("a chunk does not match its crc32: it was damaged on the way; send it again")
