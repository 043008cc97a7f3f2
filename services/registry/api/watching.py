"""What of a watch one caller may see."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from services.registry.access.permissions import Access
from services.registry.assembly import Registry
from services.registry.index.items import scope_of
from services.registry.index.watch import Batch, watch
from services.registry.records import AdapterRecord


async def visible_batches(registry: Registry, access: Access, token: str) -> AsyncIterator[Batch]:
    """The watch of one caller: own adapters, public ones and shared ones.

    An adapter that stops being visible is reported as deleted.
    """
    seen: set[str] = set()
    async for batch in watch(registry.catalog, token):
        if access.sees_all:
            yield batch
            continue
        shown = [await _shown(registry, access, event, seen) for event in batch.events]
        events = tuple(event for event in shown if event is not None)
        yield dataclasses.replace(batch, events=events)


async def _shown(
    registry: Registry, access: Access, event: dict[str, Any], seen: set[str]
) -> dict[str, Any] | None:
    kind, doc = event["kind"], event["doc"]
    if kind == "base":
        return event
    scope = scope_of(doc["tenant"], doc["name"])
    if kind == "version":
        adapter: AdapterRecord | None = AdapterRecord(
            doc["tenant"], doc["name"], doc["visibility"], tuple(doc["shared_with"])
        )
    else:
        adapter = (await registry.catalog.find(scope, "tag", doc["tag"])).adapter
    if access.may_see(doc["tenant"], adapter):
        seen.add(scope)
        return event
    if scope not in seen:
        return None
    gone = {"generation": max(2, doc["generation"])} if kind == "version" else {"targets": []}
    return {"kind": kind, "doc": {**doc, **gone}}
