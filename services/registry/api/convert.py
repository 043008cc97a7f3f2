"""Converts between the records of the registry and its protobuf messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.adapter_format.tasks import CAUSAL_LM
from loraplex.api.format_wire import (
    adapter_pooling_to_proto,
    geometry_from_proto,
    geometry_to_proto,
)
from loraplex.api.registry import Certificate
from loraplex.api.registry_wire import targets_to_proto
from loraplex.api.wire import from_message, to_message, violations_to_proto
from loraplex.errors import InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.callers import current_caller
from loraplex_services.registry.access.lookup import ResolvedVersion
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.signatures import checked_keys
from loraplex_services.registry.api.publish_options import VISIBILITY
from loraplex_services.registry.index.found import Cursor
from loraplex_services.registry.index.watch import Batch
from loraplex_services.registry.publish.file_state import FileState
from loraplex_services.registry.records import (
    AdapterRecord,
    AuditRecord,
    BaseRecord,
    KeyRecord,
    Move,
    SignatureRecord,
    TagRecord,
    TenantRecord,
    VersionRecord,
    build,
    now_s,
)

MAX_PART_BYTES = 1 << 20
"""Events in one message to a watcher, in bytes, unless a single one is larger."""


def progress_to_proto(state: FileState) -> pb.FileProgress:
    return pb.FileProgress(
        path=state.file.path, committed_bytes=state.committed_bytes, complete=state.complete
    )


def version_to_proto(
    record: VersionRecord, adapter: AdapterRecord | None, tags: Iterable[TagRecord] = ()
) -> pb.AdapterVersion:
    """A version with what its adapter and tags add.

    Callers of other tenants see neither who published it nor whom else it is shared with.

    Most lists are empty, and an empty one costs protobuf as much as a short one: only others are
    set, as every lookup comes through here.
    """
    access = Access.of(current_caller.get())
    is_owner = access.owns(record.tenant)
    message = pb.AdapterVersion(
        tenant=record.tenant,
        name=record.shown_name,
        version=record.version,
        digest=record.digest,
        base_id=record.base_id,
        base_fingerprint=record.base_fingerprint,
        created_unix_s=record.created_s,
        creator=record.creator if is_owner else "",
        parent=record.parent,
        max_rank=record.max_rank,
        num_modules=record.num_modules,
        deleted=record.deleted,
        visibility=pb.VISIBILITY_PRIVATE,
        size_bytes=record.size_bytes,
        peft_version=record.peft_version,
        rope_scaling=record.rope_scaling,
        expires_unix_s=record.expires_s,
    )
    for file in record.files:
        message.files.add(path=file.path, size=file.size, sha256=file.sha256)
    if record.labels:
        message.labels.update(record.labels)
    if record.warnings:
        message.warnings.extend(violations_to_proto(record.warnings))
    if record.signers:
        message.signers.extend(record.signers)
    if record.eos_token_ids:
        message.eos_token_ids.extend(record.eos_token_ids)
    if record.task != CAUSAL_LM or record.pooling != PoolingFields():
        message.pooling.CopyFrom(adapter_pooling_to_proto(record.task, record.pooling))
    for tag in tags:
        if any(target.version == record.version for target in tag.targets):
            message.tags.append(tag.tag)
    if adapter is not None:
        message.visibility = VISIBILITY[adapter.visibility]
        message.shared_with.extend(
            adapter.shared_with if is_owner else {*adapter.shared_with} & {access.tenant}
        )
        message.pullable = adapter.pullable
        message.description = adapter.description
        if adapter.labels:
            message.adapter_labels.update(adapter.labels)
    return message


def resolved_to_proto(resolved: ResolvedVersion) -> pb.AdapterVersion:
    return version_to_proto(resolved.version, resolved.adapter, resolved.tags)


def tag_to_proto(record: TagRecord) -> pb.Tag:
    message = pb.Tag(
        tenant=record.tenant,
        name=record.shown_name,
        tag=record.tag,
        generation=record.generation,
        updated_unix_s=record.updated_s,
        pending_reason=record.pending_reason,
        pending_until_unix_s=record.pending_until_s,
        pending_left_s=max(record.pending_until_s - now_s(), 0.0) if record.pending else 0.0,
    )
    message.targets.extend(targets_to_proto(record.targets))
    if record.pending:
        message.pending.extend(targets_to_proto(record.pending))
    return message


def move_to_proto(move: Move, tenant: str, name: str) -> pb.TagMove:
    """A move of a tag of this tenant; callers of other tenants do not see who made it."""
    is_owner = Access.of(current_caller.get()).owns(tenant)
    return pb.TagMove(
        generation=move.generation,
        targets=targets_to_proto(move.targets),
        moved_unix_s=move.moved_s,
        mover=move.mover if is_owner else "",
        name=name,
    )


def base_to_proto(record: BaseRecord) -> pb.Base:
    geometry = geometry_to_proto(record.geometry)
    geometry.weights_sha256 = record.weights_sha256
    return pb.Base(
        base_id=record.base_id,
        geometry=geometry,
        aliases=record.aliases,
        max_lora_rank=record.max_lora_rank,
    )


def base_from_proto(message: pb.Base) -> BaseRecord:
    """Raises InvalidRequest if the geometry cannot be used."""
    return BaseRecord(
        base_id=message.base_id,
        geometry=geometry_from_proto(message.geometry),
        weights_sha256=message.geometry.weights_sha256,
        aliases=tuple(sorted(set(message.aliases))),
        max_lora_rank=message.max_lora_rank,
    )


def event_to_proto(event: Mapping[str, Any]) -> pb.AdapterEvent:
    """An event of the index, JSON {kind, doc}."""
    kind, doc = event["kind"], event["doc"]
    if kind == "tag":
        return pb.AdapterEvent(tag=tag_to_proto(build(TagRecord, doc)))
    if kind == "base":
        return pb.AdapterEvent(base=base_to_proto(build(BaseRecord, doc)))
    record = build(VersionRecord, doc)
    sharing = AdapterRecord(
        record.tenant,
        record.name,
        doc["visibility"],
        tuple(doc["shared_with"]),
        doc.get("pullable", False),
        description=doc.get("description", ""),
        labels=doc.get("adapter_labels", {}),
    )
    return pb.AdapterEvent(version=version_to_proto(record, sharing))


def batch_to_protos(batch: Batch, last_token: str) -> Iterator[pb.WatchAdaptersResponse]:
    """A batch in messages that watchers can receive: one adapter may have thousands of versions.

    Args:
        last_token: token of the batch before, from where a watch that gets only a part resumes.
    """
    message = pb.WatchAdaptersResponse(snapshot_begin=batch.begins_snapshot)
    num_bytes = 0
    for event in map(event_to_proto, batch.events):
        num_bytes += event.ByteSize()
        if num_bytes > MAX_PART_BYTES and message.events:
            message.resume_token = last_token if batch.token else ""
            yield message
            message, num_bytes = pb.WatchAdaptersResponse(), event.ByteSize()
        message.events.append(event)
    message.resume_token, message.snapshot_end = batch.token, batch.ends_snapshot
    yield message


def sharing_to_proto(record: AdapterRecord) -> pb.SetSharingResponse:
    return pb.SetSharingResponse(
        visibility=VISIBILITY[record.visibility],
        shared_with=record.shared_with,
        pullable=record.pullable,
    )


def signature_to_proto(record: SignatureRecord) -> pb.Signature:
    return pb.Signature(
        key_sha256=record.key_sha256,
        bundle=record.bundle.encode(),
        public_key=record.public_key,
        verified=bool(record.public_key),
    )


def certificate_from_proto(message: pb.Certificate, access: Access) -> Certificate:
    """A certificate as it was sent, now. Its numbers are checked where it is stored."""
    return from_message(
        message,
        Certificate,
        creator=access.actor,
        created_unix_s=now_s(),
        by_operator=access.sees_all,
    )


def audit_to_proto(record: AuditRecord) -> pb.AuditEntry:
    return to_message(record, pb.AuditEntry, time_unix_s=record.time_s)


def key_to_proto(record: KeyRecord) -> pb.Key:
    return pb.Key(
        key_id=record.key_id,
        tenant=record.tenant,
        scopes=record.scopes,
        created_unix_s=record.created_s,
        expires_unix_s=record.expires_s,
        revoked=record.revoked_s > 0,
        description=record.description,
    )


def tenant_from_proto(message: pb.Tenant) -> TenantRecord:
    """Raises InvalidRequest for signature keys that are not EC public keys in PEM."""
    keys = checked_keys(message.signature_keys)
    return from_message(message, TenantRecord, signature_keys=keys)


def page_token(cursor: Cursor | None) -> str:
    """Where the next page begins, for the caller to send back; "" after the last."""
    if cursor is None:
        return ""
    text = json.dumps([cursor.scope, cursor.version])
    return base64.urlsafe_b64encode(text.encode()).decode()


def cursor_of(token: str) -> Cursor:
    """The position that a page token names. Raises InvalidRequest."""
    if not token:
        return Cursor()
    try:
        scope, version = json.loads(base64.urlsafe_b64decode(token.encode()))
        if not (isinstance(scope, str) and isinstance(version, int) and 0 <= version < 1 << 53):
            raise ValueError
        return Cursor(scope, version)
    except (ValueError, TypeError, OverflowError, RecursionError):
        description = "is not a page token of this list; start again without one"
        raise InvalidRequest.field("page_token", token, description) from None
