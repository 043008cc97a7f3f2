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
    return AdapterVersion(
        tenant=message.tenant,
        name=message.name,
        version=message.version,
        digest=message.digest,
        base_id=message.base_id,
        base_fingerprint=message.base_fingerprint,
        created_unix_s=message.created_unix_s,
        creator=message.creator,
        max_rank=message.max_rank,
        num_modules=message.num_modules,
        size_bytes=message.size_bytes,
        visibility=_VISIBILITY.get(message.visibility, "private"),
        tags=tuple(message.tags),
        labels=dict(message.labels),
        parent=message.parent,
        files=tuple(AdapterFile(f.path, f.size, f.sha256) for f in message.files),
        warnings=violations(message.warnings),
        shared_with=tuple(message.shared_with),
        peft_version=message.peft_version,
        signers=tuple(message.signers),
        pullable=message.pullable,
        deleted=message.deleted,
        task=message.pooling.task_type or "CAUSAL_LM",
        num_labels=message.pooling.num_labels,
        rope_scaling=message.rope_scaling,
        eos_token_ids=tuple(message.eos_token_ids),
        expires_unix_s=message.expires_unix_s,
        description=message.description,
        adapter_labels=dict(message.adapter_labels),
    )


def certificate(message: pb.Certificate) -> Certificate:
    """The certificate as the registry stored it."""
    return Certificate(**same_fields(message, Certificate))


def certificate_to_proto(certificate: Certificate) -> pb.Certificate:
    """What was measured; the registry adds when, and by whom."""
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
    return Tag(
        tenant=message.tenant,
        name=message.name,
        tag=message.tag,
        targets=targets(message.targets),
        generation=message.generation,
        updated_unix_s=message.updated_unix_s,
        pending=targets(message.pending),
        pending_reason=message.pending_reason,
        pending_until_unix_s=message.pending_until_unix_s,
        pending_left_s=message.pending_left_s,
    )


def targets(messages: Iterable[pb.TagTarget]) -> tuple[TagTarget, ...]:
    """What a tag points at. A weight of 0 means 1."""
    return tuple(TagTarget(t.version, t.digest, t.weight or 1) for t in messages)


def targets_to_proto(targets: Iterable[TagTarget]) -> list[pb.TagTarget]:
    """The inverse."""
    return [pb.TagTarget(version=t.version, digest=t.digest, weight=t.weight) for t in targets]


def tag_move(message: pb.TagMove) -> TagMove:
    """One past move of a tag."""
    return TagMove(
        generation=message.generation,
        targets=targets(message.targets),
        moved_unix_s=message.moved_unix_s,
        mover=message.mover,
        name=message.name,
    )


def base_model(message: pb.Base) -> BaseModel:
    """A registered base, without its list of modules."""
    return BaseModel(
        base_id=message.base_id,
        model_type=message.geometry.model_type,
        fingerprint=message.geometry.fingerprint,
        num_layers=message.geometry.num_layers,
        vocab_size=message.geometry.vocab_size,
        aliases=tuple(message.aliases),
        max_lora_rank=message.max_lora_rank,
    )


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
    return AuditEntry(**{**same_fields(message, AuditEntry), "details": dict(message.details)})


def api_key(message: pb.Key) -> ApiKey:
    """A key without its secret."""
    return ApiKey(**{**same_fields(message, ApiKey), "scopes": tuple(message.scopes)})


def tenant(message: pb.Tenant) -> Tenant:
    """A tenant with limits and use. A fairness weight of 0 means 1."""
    return Tenant(
        **tenant_limits(message), used_bytes=message.used_bytes, used_versions=message.used_versions
    )


def tenant_limits(message: pb.Tenant) -> dict[str, Any]:
    """The fields of `TenantLimits`. A fairness weight of 0 means 1."""
    values = same_fields(message, TenantLimits)
    values["signature_keys"] = tuple(message.signature_keys)
    return {**values, "fairness_weight": message.fairness_weight or 1.0}


def tenant_to_proto(limits: TenantLimits, used_bytes: int, used_versions: int) -> pb.Tenant:
    """Limits with what is used of them."""
    values = same_fields(limits, TenantLimits)
    return pb.Tenant(**values, used_bytes=used_bytes, used_versions=used_versions)


def usage_entry(message: pb.UsageEntry) -> UsageEntry:
    """One line of a tenant's usage."""
    values = {name: getattr(message, name) for name in _USAGE}
    return UsageEntry(**values, duration_s=message.duration_ms / 1000)


def usage_entry_to_proto(entry: UsageEntry) -> pb.UsageEntry:
    """The inverse, to the millisecond."""
    values = {name: getattr(entry, name) for name in _USAGE}
    return pb.UsageEntry(**values, duration_ms=round(entry.duration_s * 1000))


_USAGE = tuple(name for name in field_names(UsageEntry) if name != "duration_s")
"""Fields that have the same name in the message."""
