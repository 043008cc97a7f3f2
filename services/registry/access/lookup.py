"""Reads for callers: references, lists and watches. Reads the objects if there is no index."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.errors import AdapterNotFound
from loraplex.refs import Ref, parse_ref, why_missing
from loraplex_services.common import documents
from loraplex_services.common.callers import note_read
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.selection import check_one_base, selected, selector
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.found import Cursor, Found, IndexPage
from loraplex_services.registry.index.items import scope_of
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.index.watch import Batch, watch
from loraplex_services.registry.records import (
    PRIVATE,
    AdapterRecord,
    TagRecord,
    VersionRecord,
    build,
    to_fields,
)

_SCAN_ADAPTERS = 500
"""Most adapters, and versions, that a list looks at in one read. The first read has as many as fit
its page."""
_READS_AT_ONCE = 8
"""Adapters that a list reads from the objects at the same time; other calls read there as well."""
_MAX_NAMES = 50
"""Most adapters whose names are compared with one that does not exist."""
_MAX_NEWEST = 20
"""Versions that are read to say which ones exist."""


@dataclass(frozen=True, slots=True)
class ResolvedVersion:
    """The version behind a reference."""

    version: VersionRecord
    adapter: AdapterRecord | None
    tags: Sequence[TagRecord]
    """All tags of the adapter, or in a list those of the version."""


@dataclass(frozen=True, slots=True)
class Query:
    """The filter of a list. Empty fields match everything."""

    tenant: str = ""
    name: str = ""
    name_prefix: str = ""
    base_id: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    all_versions: bool = False


class Lookup:
    """Resolves references and lists adapters."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def resolve(
        self,
        ref: Ref,
        access: Access,
        split_key: str = "",
        base_ids: Collection[str] = (),
        *,
        to_change: bool = False,
    ) -> ResolvedVersion:
        """The live version that a reference means to this caller. A digest means the newest version
        with this content, or where it was published for several bases, the newest for the first.

        Args:
            base_ids: bases that are preferred for a digest.
            to_change: refuse a digest whose content was published for several bases.

        Raises:
            AdapterNotFound: there is none, or another tenant's private one.
            InvalidRequest: a digest does not say which one to change.
        """
        kind, wanted = selector(ref)
        found = await self._found(ref.tenant, ref.name, kind, wanted)
        is_visible = access.may_see(ref.tenant, found.adapter)
        version = selected(found, ref, split_key, base_ids)
        if found.has_more and is_visible:
            found = await self._found(ref.tenant, ref.name, "live")
            version = selected(found, ref, split_key, base_ids)
            is_visible = access.may_see(ref.tenant, found.adapter)
        if to_change and is_visible:
            check_one_base(found, ref)
        if is_visible:  # A hidden adapter must look like a missing one.
            note_read.get()(found.num_documents)
        if version is None or not is_visible:
            raise await self.missing(ref, access)
        return ResolvedVersion(version, found.adapter, found.tags)

    @contextlib.asynccontextmanager
    async def explained(self, access: Access) -> AsyncIterator[None]:
        """Let errors of a call that changes an adapter say which versions, tags and names exist.

        Raises:
            AdapterNotFound: as the call does, with a hint.
        """
        try:
            yield
        except AdapterNotFound as error:
            if error.hint:
                raise
            raise await self.missing(parse_ref(error.ref), access) from None

    async def missing(self, ref: Ref, access: Access) -> AdapterNotFound:
        """The error that says what is missing. The same look-ups are made in every case, so that
        the time does not reveal whether another tenant has a private adapter."""
        found = await self.newest(ref.tenant, ref.name)
        query = Query(tenant=access.tenant, name_prefix=ref.name[:2])
        others, _ = await self.page(query, access, _MAX_NAMES, Cursor())
        names = {scope_of(each.version.tenant, each.version.shown_name) for each in others}
        is_visible = access.may_see(ref.tenant, found.adapter)
        alive = [each for each in found.versions if not each.deleted and is_visible]
        shown = dataclasses.replace(ref, name=alive[0].shown_name) if alive else ref
        versions = [each.version for each in alive]
        tags = [tag.tag for tag in found.tags if tag.targets]
        named = str(shown) if alive else ref.adapter  # The caller may have given no tag.
        return AdapterNotFound(named, why_missing(shown, versions, tags, names))

    async def newest(self, tenant: str, name: str) -> Found:
        """Some of the newest versions that are not deleted, and some tags. Adapters may have
        thousands of both, and to read all of them takes a tenth of a second."""
        return await self._found(tenant, name, "newest", str(_MAX_NEWEST))

    async def _found(self, tenant: str, name: str, kind: str, selector: str = "") -> Found:
        """The answer of `Catalog.find`, or all versions and tags if there is no index."""
        try:
            return await self._catalog.find(scope_of(tenant, name), kind, selector)
        except CatalogDown:
            return await self._from_objects(tenant, name)

    async def tags(self, tenant: str, name: str) -> tuple[TagRecord, ...]:
        """The tags of one adapter."""
        try:
            return (await self._catalog.find(scope_of(tenant, name), "tag", "latest")).tags
        except CatalogDown:
            return (await self._from_objects(tenant, name)).tags

    async def page(
        self, query: Query, access: Access, page_size: int, after: Cursor
    ) -> tuple[list[ResolvedVersion], Cursor | None]:
        """One page of a list, ordered by scope and version, and where the next one begins."""
        entries: list[ResolvedVersion] = []
        most = page_size + 1
        while True:
            scanned, end = await self._scan(query, access, after, most)
            note_read.get()(sum(found.num_documents for _, found in scanned))
            for scope, found in scanned:
                tags = _by_version(found.tags)
                for version in _kept(found, query, access, scope):
                    if scope == after.scope and version.version <= after.version:
                        continue
                    if len(entries) == page_size:
                        return entries, Cursor.at(entries[-1].version)
                    shown = tags.get(version.version, ())
                    entries.append(ResolvedVersion(version, found.adapter, shown))
            if end is None:
                return entries, None
            after, most = end, _SCAN_ADAPTERS

    async def _scan(
        self, query: Query, access: Access, after: Cursor, most: int
    ) -> tuple[list[tuple[str, Found]], Cursor | None]:
        """Scopes that may match the query, in order, and where to go on; None = nowhere."""
        most = min(most, _SCAN_ADAPTERS)
        try:
            own = await self._range("names", query, access, after, most)
            if query.tenant or access.sees_all:
                return own.adapters, own.end
            shared = await self._range("shared", query, access, after, most)
        except CatalogDown:
            return await self._scan_objects(query, after, most)
        of_others = [each for each in shared.adapters if not access.owns(_tenant(each[0]))]
        shared_end = shared.end
        if shared_end is not None and access.owns(_tenant(shared_end.scope)):
            shared_end = Cursor(shared_end.scope)  # `own` says where to continue in it.
        ends = [end for end in (own.end, shared_end) if end is not None]
        end = min(ends, key=lambda each: each.scope, default=None)
        known = (each for each in (*own.adapters, *of_others) if not end or each[0] <= end.scope)
        return sorted(known, key=lambda each: each[0]), end

    async def _range(
        self, index: str, query: Query, access: Access, after: Cursor, most: int
    ) -> IndexPage:
        owner = query.tenant or ("" if access.sees_all or index == "shared" else access.tenant)
        low, high = "-", "+"
        if owner:
            prefix = f"{owner}/{query.name or query.name_prefix}"
            low, high = f"[{prefix}", f"({prefix}\x7f"
        which = "versions" if query.all_versions else "current"
        return await self._catalog.page(
            index, low, high, most, which=which, max_versions=most, after=after
        )

    async def _from_objects(self, tenant: str, name: str) -> Found:
        """One adapter, read from the objects."""
        versions = layout.versions_folder(tenant, name)
        tags = layout.tags_folder(tenant, name)
        tag_records = await documents.read_folder(self._store, tags, TagRecord)
        return Found(
            tuple(tag for tag in tag_records if tag.is_shown),
            tuple(await documents.read_folder(self._store, versions, VersionRecord)),
            await documents.read(self._store, layout.adapter(tenant, name), AdapterRecord),
        )

    async def _scan_objects(
        self, query: Query, after: Cursor, most: int
    ) -> tuple[list[tuple[str, Found]], Cursor | None]:
        prefix = f"{layout.ADAPTERS}{query.tenant}/" if query.tenant else layout.ADAPTERS
        adapters = {
            layout.adapter_of(info.key) async for info in self._store.list_objects(prefix)
        } - {None}
        scopes = sorted(scope_of(*adapter) for adapter in adapters if adapter is not None)
        name = query.name or query.name_prefix
        rest = [
            scope
            for scope in scopes
            if (scope > after.scope or (after.version and scope == after.scope))
            and scope.partition("/")[2].startswith(name)
        ][:most]
        end = Cursor(rest[-1]) if len(rest) == most else None
        free = asyncio.Semaphore(_READS_AT_ONCE)

        async def read(scope: str) -> tuple[str, Found]:
            async with free:
                return scope, await self._from_objects(*scope.split("/", 1))

        return list(await asyncio.gather(*map(read, rest))), end


def _tenant(scope: str) -> str:
    return scope.partition("/")[0]


def _by_version(tags: Iterable[TagRecord]) -> Mapping[int, Sequence[TagRecord]]:
    """The tags that point at each version. Comparing each version with each tag takes seconds where
    there are 1,000 of both."""
    found: dict[int, list[TagRecord]] = {}
    for tag in tags:
        for target in tag.targets:
            found.setdefault(target.version, []).append(tag)
    return found


def _current(found: Found, live: list[VersionRecord]) -> list[VersionRecord]:
    """The version that `latest` points at, as in `page.lua`; the newest if there is no such tag."""
    latest = next((tag for tag in found.tags if tag.tag == "latest"), None)
    if latest is not None and latest.targets:
        number = max(latest.targets, key=lambda target: target.weight).version
        return [record for record in live if record.version == number] or live[-1:]
    return live[-1:]


def _kept(found: Found, query: Query, access: Access, scope: str) -> list[VersionRecord]:
    """The versions of one adapter that a list shows."""
    tenant, _, name = scope.partition("/")
    if not access.may_see(tenant, found.adapter):
        return []
    if query.tenant not in ("", tenant) or query.name not in ("", name):
        return []
    if not name.startswith(query.name_prefix):
        return []
    live = [record for record in found.versions if not record.deleted]
    own = found.adapter.labels if found.adapter is not None else {}
    kept = live if query.all_versions else _current(found, live)
    return [
        record
        for record in kept
        if query.base_id in ("", record.base_id)
        and all(value in (record.labels.get(key), own.get(key)) for key, value in query.labels)
    ]


async def visible_batches(catalog: Catalog, access: Access, token: str) -> AsyncIterator[Batch]:
    """The watch of one caller: own adapters, public ones and shared ones.

    Each version and tag that stops being visible is reported as deleted, once and without its
    content; what comes after that is not reported.
    """
    seen: dict[str, set[str]] = {}

    def is_wanted(record: Mapping[str, Any]) -> bool:
        """Whether a change of an adapter may show or hide something here. Private adapters of
        others may have thousands of versions."""
        adapter = build(AdapterRecord, record)
        is_shown = bool(seen.get(scope_of(adapter.tenant, adapter.name)))
        return is_shown or access.may_see(adapter.tenant, adapter)

    tenant = "" if access.sees_all else access.tenant
    async for batch in watch(catalog, token, tenant, is_wanted):
        if access.sees_all:
            yield batch
            continue
        adapters: dict[str, AdapterRecord | None] = {}
        shown = [await _shown(catalog, access, event, seen, adapters) for event in batch.events]
        events = tuple(event for event in shown if event is not None)
        yield dataclasses.replace(batch, events=events)


async def _shown(
    catalog: Catalog,
    access: Access,
    event: dict[str, Any],
    seen: dict[str, set[str]],
    adapters: dict[str, AdapterRecord | None],
) -> dict[str, Any] | None:
    """An event as the caller may see it. Mutates: seen (versions and tags of others by scope),
    adapters (those of tags, by scope)."""
    kind, doc = event["kind"], event["doc"]
    if kind == "base" or access.owns(doc["tenant"]):
        return event
    tenant, scope = doc["tenant"], scope_of(doc["tenant"], doc["name"])
    if kind == "version":
        shared_with = tuple(doc["shared_with"])
        adapter: AdapterRecord | None = AdapterRecord(
            tenant, doc["name"], doc["visibility"], shared_with
        )
    else:
        if scope not in adapters:
            adapters[scope] = (await catalog.find(scope, "adapter")).adapter
        adapter = adapters[scope]
    item = f"{kind} {doc['version'] if kind == 'version' else doc['tag']}"
    if access.may_see(tenant, adapter):
        seen.setdefault(scope, set()).add(item)
        return event
    if item not in seen.get(scope, ()):
        return None
    seen[scope].discard(item)
    return {"kind": kind, "doc": _gone(kind, doc)}


def _gone(kind: str, doc: dict[str, Any]) -> dict[str, Any]:
    """The change that a caller receives for a version or tag that it may no longer see: its end."""
    if kind == "tag":
        tag = TagRecord(doc["tenant"], doc["name"], doc["tag"], (), doc["generation"], 0.0)
        return {**to_fields(tag), "spelling": doc.get("spelling", "")}
    version = VersionRecord(
        tenant=doc["tenant"],
        name=doc["name"],
        version=doc["version"],
        digest=doc["digest"],
        base_id=doc["base_id"],
        base_fingerprint="",
        created_s=0.0,
        files=(),
        generation=max(2, doc["generation"]),
    )
    spelling = doc.get("spelling", "")
    return {**to_fields(version), "visibility": PRIVATE, "shared_with": [], "spelling": spelling}
