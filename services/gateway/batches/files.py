"""Files of tenants: a document for each, and its bytes in segments.

The segments are written first and deleted last, so that a file that is there is complete. What a
killed gateway leaves behind is collected by `sweep.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loraplex.errors import InvalidRequest, NotFound, ResourceExhausted
from loraplex_services.common import documents
from loraplex_services.common.limits import (
    MAX_FILE_BYTES,
    MAX_FILES_PER_TENANT,
    MAX_STORED_FILE_BYTES_PER_TENANT,
)
from loraplex_services.common.objects import ObjectMissing, ObjectStoreError
from loraplex_services.common.ulid import ulid
from loraplex_services.gateway.batches import layout
from loraplex_services.gateway.batches.storage import Storage

SEGMENT_BYTES = 8 << 20
"""Bytes that an upload holds in memory. All but the last segment of a file have this size."""
_READ_BYTES = 1 << 20
"""Bytes that a download holds in memory until its reader has taken them."""

FilePurpose = Literal["batch", "batch_output"]
"""`batch` = lines of a batch job, `batch_output` = its results or errors."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The document of a file."""

    file_id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    num_bytes: int
    created_s: int
    """Unix time."""
    expires_s: int
    """Unix time; 0 = never."""

    def is_expired(self, now_s: float) -> bool:
        """Whether tenants no longer see it."""
        return 0 < self.expires_s <= now_s


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files that a tenant stores, results of batch jobs included."""

    tenant: str
    num_files: int
    num_bytes: int

    def check_quota(self) -> int:
        """How many bytes the tenant may add. Raises: ResourceExhausted if it may add no file."""
        left = MAX_STORED_FILE_BYTES_PER_TENANT - self.num_bytes
        if self.num_files >= MAX_FILES_PER_TENANT or left <= 0:
            raise ResourceExhausted(
                f"tenant {self.tenant!r} stores {self.num_files} files with {self.num_bytes} "
                f"bytes, and may store {MAX_FILES_PER_TENANT} with "
                f"{MAX_STORED_FILE_BYTES_PER_TENANT}; delete some",
                reason="FILE_QUOTA_EXCEEDED",
            )
        return left


def new_file_id() -> str:
    """Ids sort by time."""
    return f"file-{ulid(time.time())}"


class Files:
    """Creates, finds, lists, reads and deletes files."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def stored(self, tenant: str) -> StoredFiles:
        """The files that the tenant stores."""
        store = await self._storage.store()
        num_files, num_bytes = 0, 0
        async for info in store.list_objects(layout.contents(tenant)):
            num_files += info.key.endswith("/000000")
            num_bytes += info.size
        return StoredFiles(tenant, num_files, num_bytes)

    async def write(self, tenant: str, file_id: str, chunks: AsyncIterator[bytes]) -> int:
        """Store the bytes of a file that does not exist yet. Returns their number.

        Writing the same bytes again changes nothing. Raises: ObjectStoreError.
        """
        store = await self._storage.store()
        buffer, index, num_bytes = bytearray(), 0, 0
        async for chunk in chunks:
            buffer += chunk
            num_bytes += len(chunk)
            while len(buffer) >= SEGMENT_BYTES:
                data = bytes(buffer[:SEGMENT_BYTES])
                del buffer[:SEGMENT_BYTES]
                await store.put(layout.segment(tenant, file_id, index), data)
                index += 1
        if buffer:
            await store.put(layout.segment(tenant, file_id, index), bytes(buffer))
        return num_bytes

    async def add(self, record: FileRecord) -> None:
        """Make a file visible whose bytes were written."""
        store = await self._storage.store()
        key = layout.file_document(record.tenant, record.file_id)
        await store.put(key, documents.encode(record))

    async def get(
        self, tenant: str, file_id: str, field: str = "file_id", *, even_expired: bool = False
    ) -> FileRecord:
        """Raises: NotFound naming `field` if the tenant has no such file."""
        found = None
        if layout.is_file_id(file_id):
            store = await self._storage.store()
            key = layout.file_document(tenant, file_id)
            found = await documents.find(store, key, FileRecord)
        if found is None or (not even_expired and found.record.is_expired(time.time())):
            why = "no such file; it may have been deleted or have expired"
            raise NotFound.field(field, file_id[:80], why, reason="FILE_NOT_FOUND")
        return found.record

    async def documents(self, tenant: str) -> list[str]:
        """The keys of the documents of the tenant's files, in order of time."""
        store = await self._storage.store()
        return [info.key async for info in store.list_objects(layout.file_documents(tenant))]

    async def listed(self, keys: Sequence[str], purpose: str) -> AsyncGenerator[FileRecord]:
        """The files with these documents that can be read and have not expired; of one purpose if
        it is given."""
        store = await self._storage.store()
        now_s = time.time()
        async for record in documents.stream(store, keys, FileRecord):
            if not record.is_expired(now_s) and purpose in ("", record.purpose):
                yield record

    async def read(self, record: FileRecord) -> AsyncGenerator[bytes]:
        """The bytes of a file. Raises: NotFound if they were deleted meanwhile."""
        store = await self._storage.store()
        at = 0
        while at < record.num_bytes:
            index, offset = divmod(at, SEGMENT_BYTES)
            wanted = min(_READ_BYTES, SEGMENT_BYTES - offset, record.num_bytes - at)
            try:
                key = layout.segment(record.tenant, record.file_id, index)
                data = await store.get_range(key, offset, wanted)
            except ObjectMissing:
                why = "the file was deleted while it was read"
                raise NotFound(why, reason="FILE_NOT_FOUND") from None
            if len(data) != wanted:
                raise ObjectStoreError(f"{key} has {len(data)} of {wanted} bytes from {offset} on")
            at += wanted
            yield data

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file, or what was written of one that was not added."""
        store = await self._storage.store()
        await store.delete(layout.file_document(tenant, file_id))
        async for info in store.list_objects(layout.segments(tenant, file_id)):
            await store.delete(info.key)


async def capped(chunks: AsyncIterator[bytes], quota_bytes: int) -> AsyncGenerator[bytes]:
    """The chunks of an upload. Raises as soon as they are more than a file or a tenant may have:
    InvalidRequest, ResourceExhausted."""
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MAX_FILE_BYTES:
            raise file_too_large()
        if num_bytes > quota_bytes:
            raise ResourceExhausted(
                f"the file exceeds the {quota_bytes} bytes that its tenant may still store; delete "
                "others first",
                reason="FILE_QUOTA_EXCEEDED",
            )
        yield chunk


def file_too_large() -> InvalidRequest:
    """The error of a file beyond the limit."""
    why = f"the file has more than {MAX_FILE_BYTES} bytes; divide it"
    return InvalidRequest(why, reason="BODY_TOO_LARGE")
