"""Reads all versions of one adapter, from the index and, if it lacks some, from the objects."""

from __future__ import annotations

import contextlib

from loraplex_services.common import documents
from loraplex_services.common.callers import note_read
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import Item, scope_of, tag_item, version_item
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.records import AdapterRecord, TagRecord, VersionRecord


class Versions:
    """Reads version records."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def of(self, tenant: str, name: str) -> list[VersionRecord]:
        """Every version, tombstones included, by number. The list of numbers is the objects'."""
        try:
            indexed = (await self._catalog.find(scope_of(tenant, name), "all")).versions
        except CatalogDown:
            indexed = ()
        known = {record.version: record for record in indexed}
        prefix = layout.versions_folder(tenant, name)
        keys = {
            int(info.key.removeprefix(prefix).removesuffix(".json")): info.key
            async for info in self._store.list_objects(prefix)
        }
        unknown = [key for number, key in keys.items() if number not in known]
        for record in await documents.read_all(self._store, unknown, VersionRecord):
            known[record.version] = record
        note_read.get()(len(keys))
        return [known[number] for number in sorted(keys)]

    async def of_content(
        self, tenant: str, name: str, digest: str
    ) -> tuple[int, int, list[VersionRecord]]:
        """(highest number, how many are not deleted, versions by number): every version if one may
        have this content, and otherwise just the first.

        An adapter that a trainer updates has thousands of versions, and nearly every update is new.
        The index tells, as long as it lacks no number below the highest. A version above that it
        does not know yet is noticed when its number is claimed.
        """
        with contextlib.suppress(CatalogDown):
            found = await self._catalog.before_new(scope_of(tenant, name), digest)
            if found is not None:
                return found
        return await self.counted(tenant, name)

    async def counted(self, tenant: str, name: str) -> tuple[int, int, list[VersionRecord]]:
        """(highest number, how many are not deleted, every version by number). By the objects."""
        records = await self.of(tenant, name)
        num_live = sum(not record.deleted for record in records)
        return records[-1].version if records else 0, num_live, records

    async def shown_name(self, tenant: str, name: str) -> str:
        """The name of an adapter as it was first published; in lower case if there is no such
        adapter, or while the index is unavailable."""
        try:
            found = await self._catalog.find(scope_of(tenant, name), "version", "1")
        except CatalogDown:
            return name
        return found.versions[0].shown_name if found.versions else name

    async def read(self, tenant: str, name: str, number: int) -> VersionRecord | None:
        """One version from the objects, a tombstone too."""
        return await documents.read(
            self._store, layout.version(tenant, name, number), VersionRecord
        )

    async def items_of_tag(self, tag: TagRecord, indexed: int = 0) -> list[Item]:
        """Index entries of a tag, preceded by the versions that it points at and the index lacks:
        another process may have moved it to a version that is not indexed yet.

        Args:
            indexed: number of a version that the caller brings into the index itself.
        """
        items = []
        adapter_key = layout.adapter(tag.tenant, tag.name)
        for target in tag.targets:
            if target.version == indexed:
                continue
            scope = scope_of(tag.tenant, tag.name)
            found = await self._catalog.find(scope, "version", str(target.version))
            record = None
            if not found.versions:
                record = await self.read(tag.tenant, tag.name, target.version)
            if record is not None:
                adapter = await documents.read(self._store, adapter_key, AdapterRecord)
                items.append(version_item(record, adapter))
        return [*items, tag_item(tag)]
