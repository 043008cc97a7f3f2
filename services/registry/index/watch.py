"""Watches: a snapshot, then every change in order, resumable.

A token is `<epoch>:<sequence>`. Sequences are gapless within an epoch, so a watcher that was
disconnected gets exactly what it missed; where the index was lost (another epoch), or too much was
missed, it gets a new snapshot. Within one watch a tag or version never goes back to an older
generation."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.errors import Unavailable
from loraplex_services.common.units import parse_digits
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.events import MAX_READ, StoredEvent
from loraplex_services.registry.index.feed import FeedLost, IsWanted
from loraplex_services.registry.index.found import Cursor, Found, IndexPage
from loraplex_services.registry.index.items import base_item, scope_of, tag_item, version_item
from loraplex_services.registry.index.redis_calls import CatalogDown

_PAGE_SCOPES = 50
"""Most adapters in a page of a snapshot."""
_PAGE_VERSIONS = 50
"""Versions after which a page ends. Building this many keeps the event loop busy for 1.4 ms."""
_MAX_PAUSE_S = 0.02
"""Longest pause after a page, if Redis was slow."""
_RETRY_S = 0.5
_KINDS = {"version", "tag", "base", "adapter"}
"""Kinds of events. A newer registry on the same index may add others; what they change, a new
snapshot shows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in order. `token` is "" inside a snapshot, which cannot be resumed in the middle."""

    events: tuple[dict[str, Any], ...]
    """JSON {kind, doc} as in the index."""
    token: str
    begins_snapshot: bool = False
    ends_snapshot: bool = False


class _SnapshotNeeded(Exception):
    """The watcher's position is no longer in the index."""


async def watch(
    catalog: Catalog, token: str, tenant: str = "", is_wanted: IsWanted = lambda record: True
) -> AsyncIterator[Batch]:
    """Yield changes after `token` ("" = everything); waits while there is no index.

    Args:
        tenant: a snapshot has only adapters of this tenant, and those of others that are shared;
            "" = all.
        is_wanted: a change of an adapter that it does not want brings nothing.

    Raises: Unavailable, once the catalog's feed is closed.
    """
    epoch, sequence = _parse(token)
    while True:
        try:
            if not epoch:
                raise _SnapshotNeeded
            async for batch in _follow(catalog, epoch, sequence, is_wanted):
                sequence = _parse(batch.token)[1]
                yield batch
        except _SnapshotNeeded:
            try:
                async for batch in _snapshot(catalog, tenant, is_wanted):
                    epoch, sequence = _parse(batch.token)
                    yield batch
            except (CatalogDown, _SnapshotNeeded):
                epoch = ""
                await asyncio.sleep(_RETRY_S)
        except Unavailable:
            if catalog.feed.is_closed:
                raise
            await asyncio.sleep(_RETRY_S)


async def _follow(
    catalog: Catalog, epoch: str, after: int, is_wanted: IsWanted
) -> AsyncIterator[Batch]:
    """Events after a number until the epoch ends. Empty batches show that the watch is alive."""
    await _last_sequence(catalog, epoch, after)
    async with catalog.feed.joined(is_wanted):
        while True:
            try:
                entries = await catalog.feed.after(epoch, after)
            except FeedLost:
                raise _SnapshotNeeded from None
            if entries is None:
                entries = await catalog.events.read(epoch, after, MAX_READ)
                if not entries:
                    raise _SnapshotNeeded
            if [entry.number for entry in entries] != _run(after, len(entries)):
                raise _SnapshotNeeded
            async for events, number in _expanded(catalog, entries, is_wanted):
                yield Batch(tuple(events), f"{epoch}:{number}")
            after = entries[-1].number if entries else after
            if not entries:
                yield Batch((), f"{epoch}:{after}")


async def _expanded(
    catalog: Catalog, entries: list[StoredEvent], is_wanted: IsWanted
) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
    """Events, and the number up to which nothing is missing then. The last change of an adapter, if
    it is wanted, is replaced by an event for each of its versions, as they are now."""
    last = {_scope(event): number for number, event, _ in entries if event["kind"] == "adapter"}
    events: list[dict[str, Any]] = []
    for number, event, _ in entries:
        if event["kind"] not in _KINDS:
            raise _SnapshotNeeded
        if event["kind"] != "adapter":
            events.append(event)
        elif last[_scope(event)] == number:
            if events:
                yield events, number - 1
            events = []
            if is_wanted(event["doc"]):
                async with catalog.snapshot_lock:
                    events = _version_events(await catalog.find(_scope(event), "live"))
            yield events, number
            events = []
    if events:
        yield events, entries[-1].number


async def _last_sequence(catalog: Catalog, epoch: str, after: int) -> int:
    """Number of the last event, if this index is current and contains the given number."""
    current, last = await catalog.position()
    if current != epoch or last < after:
        raise _SnapshotNeeded
    return last


async def _snapshot(catalog: Catalog, tenant: str, is_wanted: IsWanted) -> AsyncIterator[Batch]:
    """A complete snapshot, ending at a number before which nothing is missing."""
    epoch, begin = await catalog.position()
    newest: dict[str, int] = {}
    events = [event.to_doc() for base in await catalog.bases() for event in base_item(base).events]
    yield Batch(tuple(events), "", begins_snapshot=True)
    async for page in _pages(catalog, tenant):
        if page.epoch != epoch:
            raise _SnapshotNeeded
        found = [event for _, found in page.adapters for event in _events_of(found)]
        newest.update({_key(event): int(event["doc"]["generation"]) for event in found})
        yield Batch(tuple(found), "")
    async for batch in _catch_up(catalog, epoch, begin, newest, is_wanted):
        yield batch


async def _pages(catalog: Catalog, tenant: str) -> AsyncIterator[IndexPage]:
    """The parts of the index that a tenant's watch looks at."""
    own = f"{tenant}/"
    ranges = [("names", f"[{own}", f"({own}\x7f"), ("shared", "-", "+")]
    for index, low, high in ranges if tenant else [("names", "-", "+")]:
        after: Cursor | None = Cursor()
        while after is not None:
            async with catalog.snapshot_lock:
                begin_s = time.monotonic()
                page = await catalog.page(
                    index,
                    low,
                    high,
                    _PAGE_SCOPES,
                    which="everything",
                    max_versions=_PAGE_VERSIONS,
                    after=after,
                )
                took_s = time.monotonic() - begin_s
                await asyncio.sleep(min(took_s, _MAX_PAUSE_S))  # the other calls have as long
            if index == "shared":
                others = [each for each in page.adapters if not each[0].startswith(own)]
                page = dataclasses.replace(page, adapters=others)
            yield page
            after = page.end


async def _catch_up(
    catalog: Catalog, epoch: str, begin: int, newest: dict[str, int], is_wanted: IsWanted
) -> AsyncIterator[Batch]:
    """Changes made while the pages were read, without those already shown; ends the snapshot."""
    end = await _last_sequence(catalog, epoch, begin)
    while begin < end:
        entries = await catalog.events.read(epoch, begin, min(MAX_READ, end - begin))
        if [entry.number for entry in entries] != _run(begin, len(entries)) or not entries:
            raise _SnapshotNeeded
        begin = entries[-1].number
        fresh = [entry for entry in entries if _is_newer(entry.doc, newest)]
        async for events, _ in _expanded(catalog, fresh, is_wanted):
            yield Batch(tuple(events), "")
    yield Batch((), f"{epoch}:{end}", ends_snapshot=True)


def _events_of(found: Found) -> list[dict[str, Any]]:
    """The current state of one adapter: its live versions, then its tags."""
    tags = [{"kind": "tag", "doc": tag_item(tag).doc} for tag in found.tags]
    return [*_version_events(found), *tags]


def _version_events(found: Found) -> list[dict[str, Any]]:
    """The live versions of one adapter, with what applies to all of them."""
    items = [version_item(v, found.adapter) for v in found.versions if not v.deleted]
    return [event.to_doc() for item in items for event in item.events]


def _is_newer(event: dict[str, Any], newest: Mapping[str, int]) -> bool:
    """Whether a snapshot may lack an event. A change of an adapter has a generation of its own, and
    only newer registries know what is in an event of another kind."""
    if event["kind"] == "adapter" or event["kind"] not in _KINDS:
        return True
    return int(event["doc"]["generation"]) > newest.get(_key(event), 0)


def _scope(event: dict[str, Any]) -> str:
    return scope_of(event["doc"]["tenant"], event["doc"]["name"])


def _key(event: dict[str, Any]) -> str:
    doc = event["doc"]
    if event["kind"] == "base":
        return f"base {doc['base_id']}"
    number = doc["tag"] if event["kind"] == "tag" else doc["version"]
    return f"{event['kind']} {doc['tenant']}/{doc['name']} {number}"


def _run(after: int, count: int) -> list[int]:
    return list(range(after + 1, after + 1 + count))


def _parse(token: str) -> tuple[str, int]:
    epoch, colon, sequence = token.partition(":")
    number = parse_digits(sequence)
    if not colon or number is None:
        return "", 0
    return epoch, number
