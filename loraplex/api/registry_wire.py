"""Converts the types of `loraplex.api.registry` to and from the messages of the registry.

The registry's own documents hold more (operations, secrets, tombstones) under names that stored
ones have; what only the registry sends is converted where it speaks gRPC.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from loraplex.api.fields import field_names, same_fields
from loraplex.api.registry import (
    AdapterFile,
    AdapterVersion,
    ApiKey,
    AuditEntry,
    BaseModel,
    Certificate,
    Change,
    Sharing,
    Tag,
    TagMove,
    TagTarget,
    UsageEntry,
)
from loraplex.api.tenants import Tenant, TenantLimits
from loraplex.api.wire import same_message_fields
from loraplex.errors import Violation
from loraplex.v1 import common_pb2
from loraplex.v1 import registry_pb2 as pb

_VISIBILITY = {
    pb.VISIBILITY_UNSPECIFIED: "private",
    pb.VISIBILITY_PRIVATE: "private",
    pb.VISIBILITY_SHARED: "shared",
    pb.VISIBILITY_PUBLIC: "public",
}
_VISIBILITY_NUMBER = {
    "": pb.VISIBILITY_UNSPECIFIED,
    "private": pb.VISIBILITY_PRIVATE,
    "shared": pb.VISIBILITY_SHARED,
    "public": pb.VISIBILITY_PUBLIC,
}


def violations(entries: Iterable[common_pb2.FieldViolation]) -> tuple[Violation, ...]:
    """Violations or warnings."""
    return tuple(Violation(v.field, v.value, v.description) for v in entries)


def adapter_version(message: pb.AdapterVersion) -> AdapterVersion:
    """A version record."""
    values = same_message_fields(message, AdapterVersion)
    values |= {
        "visibility": _VISIBILITY.get(message.visibility, "private"),
        "files": tuple(AdapterFile(f.path, f.size, f.sha256) for f in message.files),
        "warnings": violations(message.warnings),
        "task": message.pooling.task_type or "CAUSAL_LM",
        "num_labels": message.pooling.num_labels,
    }
    return AdapterVersion(**values)


def certificate(message: pb.Certificate) -> Certificate:
    """The certificate as the registry stored it."""
    return Certificate(**same_fields(message, Certificate))


def certificate_to_proto(certificate: Certificate) -> pb.Certificate:
    """The measurement as a message; the registry adds the time and the caller."""
    return pb.Certificate(**dataclasses.asdict(certificate))


def sharing(name: str, message: pb.SetSharingResponse) -> Sharing:
    """Who may use the adapter `name`."""
    return Sharing(
        name,
        _VISIBILITY.get(message.visibility, "private"),
        tuple(message.shared_with),
        message.pullable,
    )


def visibility_number(name: str) -> pb.Visibility:
    """The wire form of "private", "shared" or "public"; "" keeps what is."""
    return _VISIBILITY_NUMBER[name]


def tag(message: pb.Tag) -> Tag:
    """A tag with its sides."""
    values = same_message_fields(message, Tag)
    values |= {"targets": targets(message.targets), "pending": targets(message.pending)}
    return Tag(**values)


def targets(messages: Iterable[pb.TagTarget]) -> tuple[TagTarget, ...]:
    """The targets of a tag. A weight of 0 means 1."""
    return tuple(TagTarget(t.version, t.digest, t.weight or 1) for t in messages)


def targets_to_proto(targets: Iterable[TagTarget]) -> list[pb.TagTarget]:
    """The inverse."""
    return [pb.TagTarget(version=t.version, digest=t.digest, weight=t.weight) for t in targets]


def tag_move(message: pb.TagMove) -> TagMove:
    """One past move of a tag."""
    return TagMove(**same_message_fields(message, TagMove) | {"targets": targets(message.targets)})


def base_model(message: pb.Base) -> BaseModel:
    """A registered base, without its list of modules."""
    values = same_message_fields(message, BaseModel)
    return BaseModel(**values, **same_message_fields(message.geometry, BaseModel))


def changes(message: pb.WatchAdaptersResponse) -> list[Change]:
    """The changes of one watch message; all carry its resume token."""
    token = message.resume_token
    found = [Change("snapshot", resume_token=token)] if message.snapshot_begin else []
    for event in message.events:
        kind = event.WhichOneof("change")
        if kind == "version":
            found.append(Change(kind, version=adapter_version(event.version), resume_token=token))
        elif kind == "tag":
            found.append(Change(kind, tag=tag(event.tag), resume_token=token))
        elif kind == "base":
            found.append(Change(kind, base_id=event.base.base_id, resume_token=token))
    return found


def audit_entry(message: pb.AuditEntry) -> AuditEntry:
    """One line of the audit log."""
    return AuditEntry(**same_message_fields(message, AuditEntry))


def api_key(message: pb.Key) -> ApiKey:
    """A key without its secret."""
    return ApiKey(**same_message_fields(message, ApiKey))


def tenant(message: pb.Tenant) -> Tenant:
    """A tenant with limits and use. A fairness weight of 0 means 1."""
    return Tenant(
        **tenant_limits(message), used_bytes=message.used_bytes, used_versions=message.used_versions
    )


def tenant_limits(message: pb.Tenant) -> dict[str, Any]:
    """The fields of `TenantLimits`. A fairness weight of 0 means 1."""
    values = same_message_fields(message, TenantLimits)
    return {**values, "fairness_weight": message.fairness_weight or 1.0}


def tenant_to_proto(limits: TenantLimits, used_bytes: int, used_versions: int) -> pb.Tenant:
    """Limits with what is used of them."""
    values = same_fields(limits, TenantLimits)
    return pb.Tenant(**values, used_bytes=used_bytes, used_versions=used_versions)


def usage_entry(message: pb.UsageEntry) -> UsageEntry:
    """One line of a tenant's usage."""
    values = same_message_fields(message, UsageEntry)
    return UsageEntry(**values, duration_s=message.duration_ms / 1000)


def usage_entry_to_proto(entry: UsageEntry) -> pb.UsageEntry:
    """The inverse, to the millisecond."""
    values = {name: getattr(entry, name) for name in _USAGE}
    return pb.UsageEntry(**values, duration_ms=round(entry.duration_s * 1000))


_USAGE = tuple(name for name in field_names(UsageEntry) if name != "duration_s")
"""Fields that have the same name in the message."""
