"""Writes the bytes of one stream into the object store as parts of an upload."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor

from loraplex.errors import DataLoss
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.metrics import RECEIVED_BYTES
from loraplex_services.registry.publish.scanning import ArrivingScan

MAX_PART_BYTES = 256 << 20
"""Most bytes that must be sent again when a registry dies."""
_BATCH_BYTES = 2 << 20
"""Bytes that are checked and written together, on a thread."""
_CHECKER = ThreadPoolExecutor(1, "checks-uploads")
"""One for all uploads: many at once would take all cores, and the event loop needs one. It checks
some hundred MB per second."""


class PartWriter:
    """Writes the bytes of one stream as parts of limited size.

    Chunks are checked, hashed and written in batches, on threads, while the next ones arrive: a
    thread for each chunk would spend as much time waiting for the GIL as working.
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
        """Offset of the next chunk."""
        self._scan = scan
        self._store = store
        self._file = (upload_id, index)
        self._open()

    def _open(self) -> None:
        self._begin = self.end
        self._good_bytes = 0
        self._writer = self._store.writer()
        self._sha256 = hashlib.sha256()
        self._batch: list[tuple[bytes, int]] = []
        self._batch_bytes = 0
        self._working: asyncio.Future[None] | None = None

    async def write(self, data: bytes, crc32: int) -> None:
        """Take a chunk. Raises DataLoss if one is damaged, immediately or later; the chunks before
        it are kept."""
        if self.end - self._begin >= MAX_PART_BYTES:
            await self.finish()
            self._open()
        self.end += len(data)
        self._batch.append((data, crc32))
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            await self._pass_on()

    async def finish(self) -> None:
        """Commit the undamaged chunks. Raises DataLoss if one was damaged."""
        try:
            try:
                await self._pass_on()
                await self._worked()
            except DataLoss:
                await self._commit()
                raise
            await self._commit()
        finally:
            self._working = None  # it may hold the error, whose traceback holds the whole call
            await self._writer.abort()

    async def _commit(self) -> None:
        if self._good_bytes:
            sha256 = self._sha256.hexdigest()
            key = layout.upload_part(*self._file, self._begin, self._good_bytes, sha256)
            await self._writer.commit(key)
            RECEIVED_BYTES.inc(self._good_bytes)
            failpoint("upload.part")

    async def _pass_on(self) -> None:
        """Process the batch while the next one is collected."""
        await self._worked()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._working = asyncio.ensure_future(self._work(batch))

    async def _worked(self) -> None:
        if self._working is not None:
            await self._working

    async def _work(self, batch: list[tuple[bytes, int]]) -> None:
        loop = asyncio.get_running_loop()
        good = await loop.run_in_executor(_CHECKER, self._checked, batch)
        await self._writer.write(*good)
        self._good_bytes += sum(map(len, good))
        if len(good) < len(batch):
            raise damaged()

    def _checked(self, batch: list[tuple[bytes, int]]) -> list[bytes]:
        """Hash and scan the chunks before the first damaged one, and return them."""
        good = []
        for data, crc32 in batch:
            if zlib.crc32(data) != crc32:
                break
            self._sha256.update(data)
            if self._scan is not None:
                self._scan.feed(data)
            good.append(data)
        return good


def damaged() -> DataLoss:
    """A chunk does not match its checksum."""
    return DataLoss(
        "a chunk does not match its crc32: the file changed while it was read, or was damaged on "
        "the way; send it again"
    )
