"""Index entries of each kind of record: their scope, and the events that a change causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex_services.registry.records import (
    PRIVATE,
    AdapterRecord,
    BaseRecord,
    TagRecord,
    VersionRecord,
    to_set_fields,
)

BASES_SCOPE = "bases"


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """One change as watchers see it; the index ignores older generations."""

    generation: int
    kind: str
    doc: dict[str, Any]

    def to_doc(self) -> dict[str, Any]:
        """The item in the form that watchers read."""
        return {"kind": self.kind, "doc": self.doc}


@dataclass(frozen=True, slots=True)
class Item:
    """One document for the index."""

    key: str
    field: str
    generation: int
    doc: dict[str, Any]
    events: tuple[IndexEvent, ...]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Facts from which `apply.lua` derives more: use, digest, number, visibility, the generation of
    the adapter that was known (sharing), and the ends of staged moves and ephemeral versions."""


@dataclass(frozen=True, slots=True)
class IndexChange:
    """Documents of one scope that change together."""

    scope: str
    items: Sequence[Item]
    operation: str = ""
    """The pending note that ends with it; "" = none."""


def arguments_of(changes: Sequence[IndexChange], *, with_events: bool) -> list[bytes]:
    """The arguments of `apply.lua` for changes: actions as JSON, then the documents as they are.

    Documents are referred to by their position, so that the script need not parse them.
    """
    documents: list[bytes] = []

    def position(document: dict[str, Any]) -> int:
        documents.append(msgspec.json.encode(document))
        return len(documents)

    def entry(item: Item) -> dict[str, Any]:
        events = item.events if with_events else ()
        entries = [{"generation": e.generation, "doc": position(e.to_doc())} for e in events]
        head = {"key": item.key, "field": item.field, "generation": item.generation}
        return {**head, "doc": position(item.doc), "events": entries, **item.extra}

    wanted = [
        {"op": change.operation, "scope": change.scope, "items": [*map(entry, change.items)]}
        for change in changes
    ]
    return [msgspec.json.encode(wanted), *documents]


def scope_of(tenant: str, name: str) -> str:
    """The unit that the index changes atomically."""
    return f"{tenant}/{name}"


def version_item(record: VersionRecord, adapter: AdapterRecord | None) -> Item:
    """A version, and what it adds to the usage of its tenant."""
    use = {
        "tenant": record.tenant,
        "bytes": record.size_bytes,
        "blobs": sorted({file.sha256 for file in record.files}),
    }
    doc = to_set_fields(record)
    return Item(
        f"a:{scope_of(record.tenant, record.name)}",
        f"v{record.version}",
        record.generation,
        to_set_fields(_tombstone(record)) if record.deleted else doc,
        (_version_event(record.generation, doc, adapter),),
        {
            "use": use,
            "digest": record.digest,
            "number": record.version,
            "expires_s": record.expires_s,
            "sharing": adapter.generation if adapter else 0,
        },
    )


def _tombstone(record: VersionRecord) -> VersionRecord:
    """A deleted version as the index keeps it. Labels alone may have 0.2 MB, and there may be any
    number of tombstones."""
    return VersionRecord(
        tenant=record.tenant,
        name=record.name,
        version=record.version,
        digest=record.digest,
        base_id=record.base_id,
        base_fingerprint="",
        created_s=record.created_s,
        files=(),
        generation=record.generation,
        deleted_s=record.deleted_s,
        spelling=record.spelling,
        purged=record.purged,
    )


def _version_event(
    generation: int, doc: dict[str, Any], adapter: AdapterRecord | None
) -> IndexEvent:
    sharing = {
        "visibility": adapter.visibility if adapter else PRIVATE,
        "shared_with": adapter.shared_with if adapter else (),
        "pullable": adapter.pullable if adapter else False,
        "description": adapter.description if adapter else "",
        "adapter_labels": adapter.labels if adapter else {},
    }
    return IndexEvent(generation, "version", {**doc, **sharing})


def tag_item(record: TagRecord) -> Item:
    """A tag, with an event for every move that the index may have missed."""
    doc = to_set_fields(dataclasses.replace(record, moves=()))
    events = []
    for move in record.moves:
        past = dataclasses.replace(
            record,
            targets=move.targets,
            generation=move.generation,
            updated_s=move.moved_s,
            moves=(),
            pending=(),
            pending_reason="",
        )
        events.append(IndexEvent(move.generation, "tag", to_set_fields(past)))
    if not events or events[-1].generation < record.generation or record.pending:
        # Staged or dropped since the last move: the same targets, other pending ones.
        events = [event for event in events if event.generation < record.generation]
        events.append(IndexEvent(record.generation, "tag", doc))
    return Item(f"t:{scope_of(record.tenant, record.name)}", record.tag, record.generation, doc,
                tuple(events), {"staged_until_s": record.pending_until_s})  # fmt: skip


def adapter_item(record: AdapterRecord) -> Item:
    """An item with what belongs to an adapter as a whole. There is one event, however many versions
    it has; watchers get an event of each version instead."""
    doc = to_set_fields(record)
    return Item(
        f"a:{scope_of(record.tenant, record.name)}",
        "adapter",
        record.generation,
        doc,
        (IndexEvent(record.generation, "adapter", doc),),
        {"visibility": record.visibility},
    )


def base_item(record: BaseRecord) -> Item:
    """A base without its modules, which are large and seldom needed."""
    geometry = dataclasses.replace(record.geometry, modules=())
    doc = to_set_fields(dataclasses.replace(record, geometry=geometry))
    return Item(
        BASES_SCOPE,
        record.base_id,
        record.generation,
        doc,
        (IndexEvent(record.generation, "base", doc),),
    )
