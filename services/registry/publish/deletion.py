"""Deletes versions: a tombstone remains, so that the number is never reused."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Blocked, DataLoss
from loraplex.refs import LATEST
from loraplex_services.common import documents
from loraplex_services.common.callers import note_read
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import Item, scope_of, version_item
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.tag_rules import TagRules
from loraplex_services.registry.publish.tags import TagAddress, Tags
from loraplex_services.registry.records import AdapterRecord, TagRecord, VersionRecord, now_s

logger = logging.getLogger(__name__)

_NUM_ENDED_AT_ONCE = 8
"""Ends that run at the same time."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Left:
    """The versions that a deletion leaves."""

    live: frozenset[int]
    last: int
    """Highest number of all versions, tombstones included."""
    fallback: tuple[TagTarget, ...]
    """Where `latest` points then; empty if there is no version that it may point at."""

    def may_hold(self, number: int) -> bool:
        """Whether a tag may go on pointing at a version: also at one that is newer than this."""
        return number in self.live or number > self.last


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Deletion:
    """Deletes versions, and the tags that point at them."""

    store: ObjectStore
    catalog: Catalog
    tags: Tags
    versions: Versions
    audit: Audit
    rules: TagRules

    async def version(
        self, tenant: str, name: str, number: int, mover: str, *, force: bool, purge: bool
    ) -> list[VersionRecord]:
        """Delete one version; `latest` falls back to the newest one left.

        Raises:
            Blocked: a tag other than latest points at it, and not `force`.
            AdapterNotFound: there is no such version, or it is deleted and not to be purged.
        """
        record = await self.versions.read(tenant, name, number)
        if record is None or (record.deleted and (record.purged or not purge)):
            raise AdapterNotFound(f"{tenant}/{name}:v{number}")
        if not force:
            await self._check_untagged(record)
        return await self._delete(tenant, name, [number], mover, purge=purge)

    async def _check_untagged(self, version: VersionRecord) -> None:
        """Raises Blocked if a tag other than latest points at a version."""
        number = version.version
        holders = [
            tag.tag
            for tag in await self._all_tags(version.tenant, version.name)
            if tag.tag != LATEST and any(target.version == number for target in tag.targets)
        ]
        if holders:
            names = ", ".join(sorted(holders))
            tags, them = ("tag", "it") if len(holders) == 1 else ("tags", "them")
            raise Blocked(
                f"{version.ref} has the {tags} {names}; move {them} first, or use --force",
                reason="VERSION_IS_TAGGED",
            )

    async def adapter(
        self, tenant: str, name: str, mover: str, *, purge: bool
    ) -> list[VersionRecord]:
        """Delete every version and tag of an adapter."""
        records = await self.versions.of(tenant, name)
        numbers = [r.version for r in records if not r.deleted or (purge and not r.purged)]
        if not numbers:
            raise AdapterNotFound(f"{tenant}/{name}")
        return await self._delete(tenant, name, numbers, mover, purge=purge)

    async def retire(self, tenant: str, name: str, numbers: Sequence[int], mover: str) -> None:
        """Delete versions whose bytes need not be retained. Tags on them fall back as above."""
        await self._delete(tenant, name, numbers, mover, purge=True)

    async def end(self, versions: Sequence[tuple[str, int]], mover: str) -> int:
        """Delete ephemeral versions, given by scope and number, and purge their bytes; returns how
        many were not deleted before. They share an entry in the audit log of each tenant.

        Nothing is made durable. If a power failure undoes the deletion, the next index that is
        built contains a version whose time is over, which is deleted again.

        Raises: why they could not be deleted, if that is so for all of them. Otherwise, one that
            cannot be deleted is logged, because it must not keep others from their end.
        """
        slots = asyncio.Semaphore(_NUM_ENDED_AT_ONCE)

        async def end(scope: str, number: int) -> VersionRecord | None:
            async with slots:
                return await self._end(scope, number, mover)

        found = await asyncio.gather(*(end(*each) for each in versions), return_exceptions=True)
        failures = [each for each in found if isinstance(each, BaseException)]
        if failures and len(failures) == len(found):
            raise failures[0]
        if failures:
            fields = {"versions": len(failures), "problem": str(failures[0])}
            logger.warning("versions could not be deleted", extra=fields)
        ended = [each for each in found if isinstance(each, VersionRecord)]
        await asyncio.gather(
            *(
                self.audit.write_shared(
                    mover, each.tenant, "version.expire", f"{each.shown_name}:v{each.version}"
                )
                for each in ended
            )
        )
        return len(ended)

    async def _end(self, scope: str, number: int, mover: str) -> VersionRecord | None:
        """The tombstone; None if another registry was first."""
        tenant, _, name = scope.partition("/")
        operation = await self.catalog.note_pending(scope)
        found = await self.catalog.find(scope, "version", str(number))
        indexed = next(iter(found.versions), None)
        try:
            tombstone = await self._write_tombstone(tenant, name, number, True, indexed)
        except DataLoss:
            await self.catalog.forget_pending([operation])
            raise
        if tombstone is None:
            await self.catalog.forget_pending([operation])
            return None
        failpoint("delete.tombstone")
        await self._withdraw([tombstone], mover, operation, found.adapter)
        return tombstone

    async def _delete(
        self, tenant: str, name: str, numbers: Sequence[int], mover: str, *, purge: bool
    ) -> list[VersionRecord]:
        """Write tombstones first: a writer that points a tag at a version checks its record
        after."""
        operation = await self.catalog.note_pending(scope_of(tenant, name))
        deleted = []
        for number in numbers:
            tombstone = await self._write_tombstone(tenant, name, number, purge)
            deleted.append(tombstone or await self._record(tenant, name, number))
        failpoint("delete.tombstone")
        for record in deleted:
            action = "version.purge" if purge else "version.delete"
            await self.audit.write_version(mover, action, record)
        await self._withdraw(deleted, mover, operation)
        return deleted

    async def _record(self, tenant: str, name: str, number: int) -> VersionRecord:
        record = await self.versions.read(tenant, name, number)
        assert record is not None, "version records are never removed"
        return record

    async def _withdraw(
        self,
        deleted: Sequence[VersionRecord],
        mover: str,
        operation: str,
        adapter: AdapterRecord | None = None,
    ) -> None:
        """Remove versions of one adapter, whose tombstones are written, from tags and index.
        `adapter` saves reading it: who could see a deleted version does not matter."""
        tenant, name = deleted[0].tenant, deleted[0].name
        durable = not all(record.expires_s for record in deleted)
        items: list[Item] = []
        left: _Left | None = None
        for tag in await self._all_tags(tenant, name):
            moved = tag
            while await self._has_lost(moved, deleted):
                if left is None or moved is not tag:  # what is left has changed since
                    left = await self._left(tenant, name)
                moved = await self._release(moved, left, mover, durable=durable)
            if moved is not tag:
                items += await self.versions.items_of_tag(moved)
        if adapter is None:
            key = layout.adapter(tenant, name)
            adapter = await documents.read(self.store, key, AdapterRecord)
        items += [version_item(record, adapter) for record in deleted]
        await self.catalog.apply(scope_of(tenant, name), items, operation=operation)

    async def _write_tombstone(
        self,
        tenant: str,
        name: str,
        number: int,
        purge: bool,
        indexed: VersionRecord | None = None,
    ) -> VersionRecord | None:
        """Write a tombstone, or return None if there is one. `indexed` is the version as the index
        has it, if a power failure may have undone its creation."""
        is_new = False

        def step(current: VersionRecord | None) -> VersionRecord | None:
            nonlocal is_new
            current = current or indexed
            assert current is not None, "version records are never removed"
            is_new = not current.deleted or (purge and not current.purged)
            if not is_new:
                return None
            return dataclasses.replace(
                current,
                generation=current.generation + 1,
                deleted_s=current.deleted_s or now_s(),
                purged=purge,
            )

        key, durable = layout.version(tenant, name, number), indexed is None
        record = await documents.change(self.store, key, VersionRecord, step, durable=durable)
        return record if is_new else None

    async def _has_lost(self, tag: TagRecord, deleted: Sequence[VersionRecord]) -> bool:
        """Whether a tag points at a version that is deleted."""
        numbers = {target.version for target in tag.targets}
        if numbers & {record.version for record in deleted}:
            return True
        held = [await self.versions.read(tag.tenant, tag.name, each) for each in numbers]
        return not all(record is not None and not record.deleted for record in held)

    async def _left(self, tenant: str, name: str) -> _Left:
        """The versions that are left. They are read from the objects, because the index may lack
        the newest tombstone."""
        folder = layout.versions_folder(tenant, name)
        records = await documents.read_folder(self.store, folder, VersionRecord)
        note_read.get()(len(records))
        live = {record.version: record for record in records if not record.deleted}
        barred = await self.rules.barred(tenant, list(live.values())) if live else set()
        newest = live[max(live.keys() - barred)] if live.keys() - barred else None
        fallback = (TagTarget(newest.version, newest.digest),) if newest else ()
        return _Left(frozenset(live), max(r.version for r in records), fallback)

    async def _release(
        self, tag: TagRecord, left: _Left, mover: str, *, durable: bool
    ) -> TagRecord:
        """Move a tag off deleted versions: `latest` falls back, other tags are deleted."""
        fallback = left.fallback if tag.tag == LATEST else ()

        def choose(current: TagRecord | None) -> Sequence[TagTarget] | None:
            held = current.targets if current is not None else ()
            return None if all(left.may_hold(target.version) for target in held) else fallback

        address = TagAddress(tag.tenant, tag.name, tag.tag, tag.shown_name)
        move_id = secrets.token_hex(8)
        moved = await self.tags.move(address, choose, mover, move_id, durable=durable)
        assert moved is not None, "tags are never removed"
        return moved

    async def _all_tags(self, tenant: str, name: str) -> list[TagRecord]:
        folder = layout.tags_folder(tenant, name)
        records = await documents.read_folder(self.store, folder, TagRecord)
        note_read.get()(len(records))
        return [record for record in records if record.targets]
