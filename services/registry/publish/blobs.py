"""The bytes of an upload: where they are stored, and how they become content-addressed blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loraplex.adapter_format import File
from loraplex.errors import Blocked, InvalidAdapter, LoraplexError
from loraplex_services.common.objects import ObjectStore, Segment
from loraplex_services.registry import layout
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.inspection import FileSource, Inspected
from loraplex_services.registry.publish.uploads import Uploads, UploadSession

BLOB_FRESH_S = 1800.0
"""Blobs older than this are written again before they are referred to: half of the age at which
the collector removes unreferenced ones."""


class Blobs:
    """All blobs of a store."""

    def __init__(self, store: ObjectStore, uploads: Uploads) -> None:
        self._store = store
        self._uploads = uploads

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
        self, sources: Sequence[FileSource], inspected: Inspected, damaged: Sequence[str]
    ) -> None:
        """Store all bytes as content-addressed blobs, then check that they are there.

        All are stored concurrently, because the cost is waiting for the disk: nothing refers to the
        manifest before there is a version. Blobs with a sha256 in `damaged` are overwritten.
        """
        now = await self._store.clock_s()
        await asyncio.gather(
            *(self._keep_one(source, now, source.file.sha256 in damaged) for source in sources),
            self._keep_manifest(inspected, now),
        )
        failpoint("publish.manifest")
        keys = [layout.blob(inspected.digest), *(layout.blob(s.file.sha256) for s in sources)]
        for key, found in zip(
            keys, await asyncio.gather(*map(self._store.head, keys)), strict=True
        ):
            if found is None:
                raise LoraplexError(f"blob {key} vanished while it was being published")

    async def _keep_manifest(self, inspected: Inspected, now: float) -> None:
        key = layout.blob(inspected.digest)
        if not await self._is_fresh(key, len(inspected.manifest), now):
            await self._store.put(key, inspected.manifest)

    async def _keep_one(self, source: FileSource, now: float, is_damaged: bool) -> None:
        key = layout.blob(source.file.sha256)
        if is_damaged or not await self._is_fresh(key, source.file.size, now):
            await self._store.compose(key, source.segments)
        failpoint("publish.blob")

    async def _is_fresh(self, key: str, size: int, now: float) -> bool:
        info = await self._store.head(key)
        return info is not None and info.size == size and now - info.modified_s < BLOB_FRESH_S
