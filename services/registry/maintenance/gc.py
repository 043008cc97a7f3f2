"""Garbage collection: deletes the bytes that nothing refers to.

What decides is the age of a blob by the store's clock, never a lease. An unreferenced blob is
deleted only if it was not written for an hour, and publishers write a blob again if it is older
than half an hour. The age is checked again just before the deletion.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from loraplex_services.common.documents import decoded
from loraplex_services.common.objects import ObjectInfo, ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.maintenance.snapshots import Snapshots
from loraplex_services.registry.publish.blobs import BLOB_FRESH_S
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.uploads import SESSION_MAX_AGE_S
from loraplex_services.registry.records import VersionRecord

logger = logging.getLogger(__name__)

MIN_AGE_S = 2 * BLOB_FRESH_S
RETENTION_S = 7 * 24 * 3600.0
"""How long the bytes of a deleted version are kept, unless it was purged."""


@dataclass(slots=True)
class CollectionResult:
    """The result of a collection, or of a dry run."""

    deleted_objects: int = 0
    deleted_bytes: int = 0
    kept_objects: int = 0


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects in one store."""

    store: ObjectStore
    min_age_s: float = MIN_AGE_S
    session_max_age_s: float = SESSION_MAX_AGE_S
    retention_s: float = RETENTION_S

    async def collect(self, *, dry_run: bool = False) -> CollectionResult:
        """Remove dead uploads first, then blobs. Safe while publishers and other collectors run.

        Raises: DataLoss naming a version whose record is damaged: what it needs is not known.
        """
        now_s = await self.store.clock_s()
        result = CollectionResult()
        await self._collect_uploads(now_s, result, dry_run=dry_run)
        blobs = [info async for info in self.store.list_objects(layout.BLOBS)]
        # Blobs are listed before references are read: what is published in between keeps its own.
        # Copies of versions in a snapshot count only where a listing made now names the same tag.
        referenced = await self._referenced(now_s)
        for info in blobs:
            old = now_s - info.modified_s >= self.min_age_s
            sha256 = info.key.rpartition("/")[2]
            await self._settle(info, old and sha256 not in referenced, result, dry_run=dry_run)
        logger.info(
            "garbage collected",
            extra={"objects": result.deleted_objects, "bytes": result.deleted_bytes},
        )
        return result

    async def _collect_uploads(
        self, now_s: float, result: CollectionResult, *, dry_run: bool
    ) -> None:
        """Delete sessions without a write for a day, the session document last."""
        sessions: dict[str, list[ObjectInfo]] = {}
        async for info in self.store.list_objects(layout.UPLOADS):
            upload_id = info.key.removeprefix(layout.UPLOADS).partition("/")[0]
            sessions.setdefault(upload_id, []).append(info)
        for infos in sessions.values():
            dead = now_s - max(info.modified_s for info in infos) >= self.session_max_age_s
            for info in sorted(infos, key=lambda info: info.key.endswith("session.json")):
                await self._settle(info, dead, result, dry_run=dry_run)

    async def _settle(
        self, info: ObjectInfo, dead: bool, result: CollectionResult, *, dry_run: bool
    ) -> None:
        if dead and (dry_run or await self.store.delete_if_older(info.key, info.modified_s)):
            result.deleted_objects += 1
            result.deleted_bytes += info.size
            failpoint("gc.delete")
        else:
            result.kept_objects += 1

    async def _referenced(self, now_s: float) -> set[str]:
        """sha256 of every blob that a version needs, live or still retained."""
        referenced: set[str] = set()
        async for batch in Snapshots(self.store).documents("versions"):
            for key, data in batch:
                record = decoded(VersionRecord, key, data)
                expired = now_s - record.deleted_s >= self.retention_s
                if record.deleted and (record.purged or expired):
                    continue
                referenced.add(record.digest.removeprefix("sha256:"))
                referenced.update(file.sha256 for file in record.files)
        return referenced
