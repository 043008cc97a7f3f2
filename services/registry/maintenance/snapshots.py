"""Writes all documents of adapters into one object, so that a rebuild need not read them singly.

A store that lists entity tags tells by its listing which document is the one that was copied: the
same key with the same tag. Tags never come back (every document carries a random `write_id`), so
whatever changed while a snapshot was written, a document that is taken from it equals the object,
and all other documents are read.

A snapshot is a gzip stream of the documents in the order of their keys, each after a line
`[key, entity tag, size]`. Its own key ends with its sha256; one that does not match is passed over.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import IO

from loraplex_services.common.objects import ObjectInfo, ObjectMissing, ObjectStore, read_chunks
from loraplex_services.common.ulid import ulid
from loraplex_services.registry import layout

logger = logging.getLogger(__name__)

_BATCH_KEYS = 500
_KEPT = 2
"""The snapshot before the newest is kept for processes that are reading it."""
_CHUNK_BYTES = 1 << 20
_GZIP = 31
"""`wbits` of zlib for a gzip header and trailer."""

Document = tuple[ObjectInfo, bytes]


class Snapshots:
    """Reads all documents of adapters, and writes copies of them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def are_useful(self) -> bool:
        """Whether the store's listings show that a copy is current."""
        return self._store.lists_etags

    async def documents(self, folder: str = "") -> AsyncIterator[list[tuple[str, bytes]]]:
        """(key, bytes) of everything under `adapters/`, whole adapters together, by key.

        Args:
            folder: "versions" or "tags", to read only those.
        """
        with tempfile.TemporaryFile() as file:
            async for listed, copies in self._listed(await self._newest(file)):
                infos = [i for i in listed if not folder or f"/{folder}/" in i.key]
                unread = [info.key for info in infos if info.key not in copies]
                found = zip(unread, await self._store.get_many(unread), strict=True)
                copies.update({key: data for key, data in found if data is not None})
                yield [(info.key, copies[info.key]) for info in infos if info.key in copies]

    async def write(self) -> str:
        """Write a new snapshot, reusing the current parts of the last one; returns its key."""
        with tempfile.TemporaryFile() as last, tempfile.TemporaryFile() as file:
            packing = _Packing(file)
            async for infos, copies in self._listed(await self._newest(last)):
                documents = await self._completed(infos, copies)
                await asyncio.to_thread(packing.add, documents)
            sha256 = await asyncio.to_thread(packing.finish)
            key = layout.snapshot(ulid(await self._store.clock_s()), sha256)
            await self._upload(file, key)
        others = [other for other in await self._keys() if other != key]
        for old in others[: 1 - _KEPT]:
            await self._store.delete(old)
        logger.info("snapshot written", extra={"documents": packing.count, "key": key})
        return key

    async def _keys(self) -> list[str]:
        """The oldest first, by the store's clock."""
        infos = [info async for info in self._store.list_objects(layout.SNAPSHOTS)]
        return [info.key for info in sorted(infos, key=lambda info: (info.modified_s, info.key))]

    async def _newest(self, file: IO[bytes]) -> _Copies:
        """The documents of the newest complete snapshot, kept in `file`; empty if there is none."""
        if not self.are_useful:
            return _Copies(None)
        for key in reversed(await self._keys()):
            if await self._download(key, file):
                return _Copies(file)
            logger.warning("snapshot is damaged or missing", extra={"key": key})
        return _Copies(None)

    async def _download(self, key: str, file: IO[bytes]) -> bool:
        """Download a snapshot to `file`; False if its content does not match its name."""
        file.seek(0)
        file.truncate()
        digest = hashlib.sha256()
        info = await self._store.head(key)
        try:
            async for data in read_chunks(self._store, key, 0, info.size if info else 0):
                digest.update(data)
                file.write(data)
        except ObjectMissing:
            return False
        file.seek(0)
        return layout.sha256_of_snapshot(key) == digest.hexdigest()

    async def _listed(
        self, copies: _Copies
    ) -> AsyncIterator[tuple[list[ObjectInfo], dict[str, bytes]]]:
        """Everything under `adapters/` in batches of whole adapters, with the current copies."""
        batch: list[ObjectInfo] = []
        async for info in self._store.list_objects(layout.ADAPTERS):
            if len(batch) >= _BATCH_KEYS and _adapter(info.key) != _adapter(batch[-1].key):
                yield batch, await asyncio.to_thread(copies.of, batch)
                batch = []
            batch.append(info)
        if batch:
            yield batch, await asyncio.to_thread(copies.of, batch)

    async def _completed(
        self, infos: Sequence[ObjectInfo], copies: dict[str, bytes]
    ) -> list[Document]:
        """Current copies, and the other documents read again, each with its entity tag."""

        async def document(info: ObjectInfo) -> Document | None:
            copy = copies.get(info.key)
            if copy is not None:
                return info, copy
            try:
                stored = await self._store.get(info.key)
            except ObjectMissing:
                return None
            return ObjectInfo(info.key, len(stored.data), 0.0, stored.etag), stored.data

        documents = await asyncio.gather(*map(document, infos))
        return [found for found in documents if found is not None]

    async def _upload(self, file: IO[bytes], key: str) -> None:
        file.seek(0)
        writer = self._store.writer()
        try:
            while data := file.read(_CHUNK_BYTES):
                await writer.write(data)
            await writer.commit(key)
        finally:
            await writer.abort()


class _Packing:
    """Writes documents to a file and computes its hash."""

    def __init__(self, file: IO[bytes]) -> None:
        self.count = 0
        self._file = file
        self._gzip = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._sha256 = hashlib.sha256()

    def add(self, documents: Sequence[Document]) -> None:
        for info, data in documents:
            head = json.dumps([info.key, info.etag, len(data)]).encode()
            self._write(self._gzip.compress(head + b"\n" + data))
        self.count += len(documents)

    def finish(self) -> str:
        """The sha256 of the file."""
        self._write(self._gzip.flush())
        return self._sha256.hexdigest()

    def _write(self, data: bytes) -> None:
        self._sha256.update(data)
        self._file.write(data)


class _Copies:
    """The documents of a snapshot, read once in parallel with a listing."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._copies = _unpacked(file) if file is not None else iter(())
        self._next = next(self._copies, None)

    def of(self, infos: Sequence[ObjectInfo]) -> dict[str, bytes]:
        """The listed documents that are unchanged since the snapshot, by key; both are sorted by
        key."""
        etags = {info.key: info.etag for info in infos}
        current: dict[str, bytes] = {}
        while self._next is not None and self._next[0] <= infos[-1].key:
            key, etag, data = self._next
            if etags.get(key) == etag:
                current[key] = data
            self._next = next(self._copies, None)
        return current


def _unpacked(file: IO[bytes]) -> Iterator[tuple[str, str, bytes]]:
    """(key, entity tag, bytes) of each document of a snapshot."""
    gzip = zlib.decompressobj(_GZIP)
    text = b""
    while data := file.read(_CHUNK_BYTES):
        text += gzip.decompress(data)
        at = 0
        while (end := text.find(b"\n", at)) >= 0:
            key, etag, size = json.loads(text[at:end])
            after = end + 1 + size
            if after > len(text):
                break
            yield key, etag, text[end + 1 : after]
            at = after
        text = text[at:]


def _adapter(key: str) -> str:
    return "/".join(key.split("/")[:3])
