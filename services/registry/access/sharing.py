"""Settings of an adapter that apply to all its versions: who may use it, and its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from loraplex.errors import AdapterNotFound, InvalidRequest
from loraplex_services.common import documents
from loraplex_services.common.callers import note_read
from loraplex_services.common.limits import MAX_LABELS_BYTES
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import adapter_item, scope_of
from loraplex_services.registry.records import PRIVATE, PUBLIC, SHARED, AdapterRecord

MAX_SHARED_WITH = 1000
MAX_LABELS = 64
VISIBILITY_NAMES = {PRIVATE: "private", SHARED: "shared", PUBLIC: "public"}


@dataclasses.dataclass(frozen=True, slots=True)
class SharingChange:
    """A change of sharing."""

    visibility: int
    """PRIVATE, SHARED or PUBLIC; 0 keeps it."""
    shared_with: tuple[str, ...] = ()
    pullable: bool | None = None
    """None keeps the setting, except that a private adapter is not pullable."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterSharing:
    """Changes who may use adapters, and their descriptions and labels."""

    store: ObjectStore
    catalog: Catalog
    audit: Audit

    async def set(self, tenant: str, name: str, wanted: SharingChange, actor: str) -> AdapterRecord:
        """Change who may use an adapter, and return its record. A change of nothing only reads it
        and is not in the audit log.

        Raises:
            AdapterNotFound: there is no such adapter.
            InvalidRequest: a list of tenants without SHARED, or the other way round.
        """
        _check(wanted)
        record, subject = await self._changed(tenant, name, lambda held: shared(held, wanted))
        details = {
            "visibility": VISIBILITY_NAMES[record.visibility],
            "shared_with": " ".join(record.shared_with),
            "pullable": str(record.pullable).lower(),
        }
        if wanted != SharingChange(visibility=0):
            await self.audit.write(actor, tenant, "adapter.share", subject, details=details)
        return record

    async def describe(
        self,
        tenant: str,
        name: str,
        description: str | None,
        set_labels: Mapping[str, str],
        remove_labels: Sequence[str],
        actor: str,
    ) -> AdapterRecord:
        """Change description and labels, and return the adapter's record. A change of nothing only
        reads it and is not in the audit log.

        Raises:
            AdapterNotFound: there is no such adapter.
            InvalidRequest: too many labels.
        """

        def changed(held: AdapterRecord) -> AdapterRecord:
            kept = {key: value for key, value in held.labels.items() if key not in remove_labels}
            labels = dict(sorted((kept | dict(set_labels)).items()))
            if len(labels) > MAX_LABELS:
                why = f"at most {MAX_LABELS} labels of one adapter; remove some"
                raise InvalidRequest.field("set_labels", f"{len(labels)}", why)
            check_label_bytes(labels, "set_labels")
            text = held.description if description is None else description
            return dataclasses.replace(held, description=text, labels=labels)

        record, subject = await self._changed(tenant, name, changed)
        labels = " ".join(sorted(f"{key}={value}" for key, value in record.labels.items()))
        details = {"description": record.description, "labels": labels}
        if description is not None or set_labels or remove_labels:
            await self.audit.write(actor, tenant, "adapter.describe", subject, details=details)
        return record

    async def _changed(
        self, tenant: str, name: str, change: Callable[[AdapterRecord], AdapterRecord]
    ) -> tuple[AdapterRecord, str]:
        """The record after a change, which is in the index, and `tenant/name` as it was first
        published. Raises: AdapterNotFound."""
        scope = scope_of(tenant, name)
        num_live = await self.catalog.num_live(scope)  # Builds the index if there is none.
        newest = (await self.catalog.find(scope, "newest", "1")).versions
        if not newest:
            raise AdapterNotFound(f"{tenant}/{name}")
        operation = await self.catalog.note_pending(scope)

        def step(current: AdapterRecord | None) -> AdapterRecord | None:
            held = current or AdapterRecord(tenant, name, PRIVATE, generation=0)
            changed = change(held)
            if current is not None and changed == current:
                return None
            return dataclasses.replace(changed, generation=held.generation + 1)

        key = layout.adapter(tenant, name)
        record = await documents.change(self.store, key, AdapterRecord, step)
        assert record is not None, "a changed adapter has a record"
        item = adapter_item(record)
        # Each watch that shows the adapter reads all of its versions.
        note_read.get()(self.catalog.feed.num_wanting(item.doc) * num_live)
        await self.catalog.apply(scope, [item], operation=operation)
        return record, f"{tenant}/{newest[0].shown_name}"


def check_label_bytes(labels: Mapping[str, str], field: str) -> None:
    """Raises InvalidRequest for labels that are too long together: every gateway keeps them."""
    num_bytes = sum(len(text.encode()) for pair in labels.items() for text in pair)
    if num_bytes > MAX_LABELS_BYTES:
        why = f"at most {MAX_LABELS_BYTES} bytes of keys and values together"
        raise InvalidRequest.field(field, f"{num_bytes} bytes", why)


def _check(wanted: SharingChange) -> None:
    if bool(wanted.shared_with) != (wanted.visibility == SHARED):
        description = "needs tenants if and only if the visibility is 'shared'"
        raise InvalidRequest.field("shared_with", list(wanted.shared_with), description)
    check_num_recipients(len(wanted.shared_with))


def check_num_recipients(count: int) -> None:
    """Raises InvalidRequest if there are too many."""
    if count > MAX_SHARED_WITH:
        description = f"at most {MAX_SHARED_WITH} tenants; make it public"
        raise InvalidRequest.field("shared_with", f"{count}", description)


def shared(held: AdapterRecord, wanted: SharingChange) -> AdapterRecord:
    """The record after a change, with the same generation."""
    visibility = wanted.visibility or held.visibility
    kept = held.pullable and wanted.visibility != PRIVATE
    pullable = kept if wanted.pullable is None else wanted.pullable
    shared_with = tuple(sorted(set(wanted.shared_with)))
    if not wanted.visibility:
        shared_with = held.shared_with
    return dataclasses.replace(
        held, visibility=visibility, shared_with=shared_with, pullable=pullable
    )
