"""The interface of object stores. `file.py` and `s3.py` implement it; one contract suite checks
both.

A store contains two kinds of objects. *Documents* are small JSON texts that change only by
conditional writes (`put_if_absent`, `put_if_match`); every document carries a random `write_id`, so
that two writes never have the same bytes and an entity tag is never reused. *Blobs* have any size,
are named by their content, and never change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from loraplex.errors import Unavailable

BLOBS = "blobs/sha256/"
"""Prefix of the keys of all blobs."""
CHUNK_BYTES = 4 << 20
"""Bytes that `read_chunks` reads from a store at a time."""


After = asyncio.Future[Any] | None
"""Work that a write waits for: the object appears only once the work is done. If the work fails,
the object never appears, and the write raises its error. The store may prepare the bytes
meanwhile."""


class ObjectStoreError(Unavailable):
    """The store could not be reached or refused for a reason of its own."""

    reason = "OBJECT_STORE_UNAVAILABLE"


class ObjectMissing(ObjectStoreError):
    """No object has this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no object {key!r}")
        self.key = key


class PreconditionFailed(ObjectStoreError):
    """A conditional write met another state than it expected; nothing was written."""

    def __init__(self, key: str) -> None:
        super().__init__(f"object {key!r} is not in the expected state")
        self.key = key


class WriteUncertain(ObjectStoreError):
    """A conditional write failed at the server, and the object differs from what was to be written:
    the write had no effect, or another writer has changed the object since. Some servers answer
    this to the losers of a race."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A document as it was read."""

    data: bytes
    etag: str
    """Opaque; only valid for `put_if_match` on the same store."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One entry of a listing."""

    key: str
    size: int
    modified_s: float
    """Unix time of the last write by the store's own clock."""
    etag: str = ""
    """Entity tag as in `get`, if the store's listings have it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes of an object, as `compose` takes it."""

    key: str
    offset: int
    length: int
    whole: bool
    """True when the run is the entire object, which stores can copy without reading it."""


class BlobWriter(Protocol):
    """A write in progress. Nothing is visible before `commit` returns."""

    async def write(self, *data: bytes) -> None:
        """Append, one after another."""

    async def commit(self, key: str) -> None:
        """Make the bytes durable and visible under `key`, all at once. Ends the writer."""

    async def abort(self) -> None:
        """Drop the bytes. Harmless after `commit`."""


class ObjectStore(Protocol):
    """Keys are '/'-separated, ASCII, without '.' or '..' parts. Every method may raise
    ObjectStoreError; a write that returned is visible to every reader, and durable unless its
    caller waived that."""

    lists_etags: bool
    """Whether listings contain etags."""

    @property
    def url(self) -> str:
        """Where the store is, for people. It contains no secret."""

    async def get(self, key: str) -> StoredObject:
        """Read a whole document. Raises ObjectMissing."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read many documents; None if one is missing."""

    async def get_folder(self, prefix: str) -> list[tuple[str, bytes]]:
        """Every document under a prefix with its key, in the order of the keys."""

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`, fewer at the end. Raises ObjectMissing."""

    async def head(self, key: str) -> ObjectInfo | None:
        """Size and age, or None if there is no such object."""

    async def put(self, key: str, data: bytes, *, after: After = None) -> None:
        """Write a small blob, replacing equal bytes and renewing its age."""

    async def put_if_absent(
        self, key: str, data: bytes, *, durable: bool = True, after: After = None
    ) -> str:
        """Create an object and return its etag. Raises PreconditionFailed if one exists, and
        WriteUncertain.

        Without `durable`, a power failure of the store within seconds may undo the write. It may
        damage a blob, whose readers notice it, but no document.
        """

    async def make_durable(self, key: str) -> bool:
        """Make an object durable that may have been created without that; False if there is
        none."""

    async def put_if_match(
        self, key: str, data: bytes, etag: str, *, durable: bool = True, after: After = None
    ) -> str:
        """Replace a document that still has `etag`, and return the new etag. Raises
        PreconditionFailed if it changed or is gone, and WriteUncertain. `durable` as in
        `put_if_absent`."""

    def writer(self) -> BlobWriter:
        """Begin a blob of any size."""

    async def compose(self, key: str, segments: Sequence[Segment]) -> None:
        """Make a blob of `segments` in order, renewing its age if it exists."""

    def list_objects(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key begins with `prefix` and is greater than `start_after`, by key."""

    async def delete(self, key: str, *, durable: bool = True) -> None:
        """Remove an object; nothing happens if there is none. Without `durable`, a power failure
        of the store within seconds may bring it back."""

    async def delete_if_older(self, key: str, modified_s: float) -> bool:
        """Remove an object unless it was written after `modified_s`. Returns whether it is gone."""

    async def clock_s(self) -> float:
        """The time of the store's own clock, which also sets `modified_s`, in unix seconds."""

    async def close(self) -> None:
        """Close connections."""


@runtime_checkable
class QuotesEtags(Protocol):
    """A store whose server expects etags in conditions either quoted or unquoted."""

    quote_etags: bool


@runtime_checkable
class ChecksUploads(Protocol):
    """A store behind a network, where bytes may be damaged in transit."""

    async def find_upload_check(self, key: str) -> bool:
        """Find out how damage is noticed, writing `key`; False = it would not be."""


def blob_key(sha256: str) -> str:
    """Key of a blob, by its hash with or without the prefix `sha256:`."""
    digits = sha256.removeprefix("sha256:")
    return f"{BLOBS}{digits[:2]}/{digits}"


async def read_chunks(
    store: ObjectStore, key: str, offset: int, length: int
) -> AsyncGenerator[bytes, None]:
    """Yield `length` bytes of an object from `offset` on, in chunks of at most CHUNK_BYTES.

    Raises ObjectStoreError if the object ends early.
    """
    end = offset + length
    while offset < end:
        data = await store.get_range(key, offset, min(CHUNK_BYTES, end - offset))
        if not data:
            raise ObjectStoreError(f"object {key!r} ends at byte {offset}, expected {end}")
        offset += len(data)
        yield data
