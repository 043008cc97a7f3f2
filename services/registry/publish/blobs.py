"""The bytes of an upload: where they are stored, and how they become content-addressed blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loraplex.adapter_format import File
from loraplex.errors import Blocked, InvalidAdapter, LoraplexError
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.objects import ObjectStore, ObjectStoreError, Segment
from loraplex_services.registry import layout
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.inspection import FileSource, Inspected
from loraplex_services.registry.publish.uploads import Uploads, UploadSession

BLOB_FRESH_S = 1800.0
"""Blobs older than this are written again before they are referred to: half of the age at which
the collector removes unreferenced ones."""
_SEEN_S = 60.0
"""How long a blob counts as intact and fresh after that was checked. Versions often share a
config."""
_MAX_SEEN = 1000


class Blobs:
    """All blobs of a store."""

    def __init__(self, store: ObjectStore, uploads: Uploads) -> None:
        self._store = store
        self._uploads = uploads
        self._seen: LruCache[tuple[str, bool], float] = LruCache(_MAX_SEEN)
        """When blobs were last found to be intact and fresh, on the clock of the event loop, by key
        and by whether they were made durable then."""

    async def sources(self, session: UploadSession) -> list[FileSource]:
        """The stored bytes of each file.

        Raises:
            InvalidAdapter: they were refused and deleted.
            Blocked: some are missing.
        """
        states = await self._uploads.state(session)
        missing = [state for state in states if not state.complete]
        known = await self.known_files(session, [state.file for state in missing])
        sources, lacking = [], []
        for state in states:
            if state.complete:
                parts = tuple(state.segments())
                sources.append(FileSource(state.file, parts, state.known_sha256))
            elif state.file in known:
                key = layout.blob(state.file.sha256)
                whole = Segment(key, 0, state.file.size, whole=True)
                sources.append(FileSource(state.file, (whole,), ""))
            else:
                lacking.append(f"{state.file.path} ({state.committed_bytes}/{state.file.size})")
        if lacking:
            refusal = await self._uploads.refusal(session.upload_id)
            if refusal is not None and not any(state.committed_bytes for state in missing):
                raise InvalidAdapter.of(refusal.violations)
            raise Blocked(
                f"the upload is not complete: {', '.join(lacking)}", reason="UPLOAD_INCOMPLETE"
            )
        return sources

    async def known_files(self, session: UploadSession, files: Sequence[File]) -> set[File]:
        """Files whose bytes this tenant has already, so that they need not be sent."""
        usable = {*session.known} - {*session.damaged}
        candidates = [file for file in files if file.sha256 in usable]
        known = set()
        for file in candidates:
            info = await self._store.head(layout.blob(file.sha256))
            if info is not None and info.size == file.size:
                known.add(file)
        return known

    async def keep(
        self, sources: Sequence[FileSource], inspected: Inspected, session: UploadSession
    ) -> None:
        """Store all bytes as content-addressed blobs.

        All are stored concurrently, because the cost is waiting for the disk: nothing refers to the
        manifest before there is a version. Damaged blobs are overwritten. The blobs of an ephemeral
        version need not be durable. Another version that shares one of them makes it durable. Blobs
        that were found without their bytes being in memory are checked again at the end: to copy
        the others may take so long that a collector finds them old.
        """
        damaged, durable = session.damaged, session.is_durable
        found = await asyncio.gather(
            *(self._keep_one(each, each.file.sha256 in damaged, durable) for each in sources),
            self._keep_content(layout.blob(inspected.digest), inspected.manifest, durable),
        )
        failpoint("publish.manifest")
        for key in filter(None, found):
            stored = self._store.make_durable(key) if durable else self._store.head(key)
            if not await stored:
                raise LoraplexError(f"blob {key} vanished while it was being published")

    async def _keep_one(self, source: FileSource, is_damaged: bool, durable: bool) -> str:
        """Returns the key of a blob that is to be checked at the end; else ""."""
        key, left = layout.blob(source.file.sha256), ""
        if source.content is not None:
            await self._keep_content(key, source.content, durable)
        elif not is_damaged and await self._is_fresh(key, source.file.size):
            left = key
        else:
            await self._store.compose(key, source.segments)
        failpoint("publish.blob")
        return left

    async def _keep_content(self, key: str, content: bytes, durable: bool) -> None:
        """Store bytes that are in memory, unless their blob is intact and fresh."""
        if await self._was_seen(key, len(content), durable):
            return
        if await self._created(key, content, durable):
            return
        if not await self._is_intact(key, content, durable):
            await self._store.put(key, content)

    async def _created(self, key: str, content: bytes, durable: bool) -> bool:
        """Try to create a blob. If there is one, it may have to be made durable or fresh."""
        try:
            await self._store.put_if_absent(key, content, durable=durable)
        except ObjectStoreError:
            return False
        return True

    async def _is_intact(self, key: str, content: bytes, durable: bool) -> bool:
        """Whether a blob is fresh and has this content, and is durable if it is to be."""
        begin_s = asyncio.get_running_loop().time()
        if not await self._is_fresh(key, len(content)):
            return False
        if await self._store.get_range(key, 0, len(content)) != content:
            return False
        if durable and not await self._store.make_durable(key):
            return False
        self._seen.put((key, durable), begin_s)
        return True

    async def _was_seen(self, key: str, size: int, durable: bool) -> bool:
        seen_s = self._seen.get((key, durable))
        if seen_s is None or asyncio.get_running_loop().time() - seen_s > _SEEN_S:
            return False
        info = await self._store.head(key)
        return info is not None and info.size == size

    async def _is_fresh(self, key: str, size: int) -> bool:
        info = await self._store.head(key)
        if info is None or info.size != size:
            return False
        return await self._store.clock_s() - info.modified_s < BLOB_FRESH_S
