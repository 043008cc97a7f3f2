"""Converts the messages of the registry to the records of `loraplex.api.registry`."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.api.registry import (
    AdapterFile,
    AdapterVersion,
    ApiKey,
    AuditEntry,
    BaseModel,
    Change,
    Sharing,
    Tag,
    TagMove,
    TagTarget,
    Tenant,
    UsageEntry,
)
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
    )


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
    )


def targets(messages: Iterable[pb.TagTarget]) -> tuple[TagTarget, ...]:
    """Sides of a tag."""
    return tuple(TagTarget(t.version, t.digest, t.weight) for t in messages)


def tag_move(message: pb.TagMove) -> TagMove:
    """One past move of a tag."""
    return TagMove(
        message.generation, targets(message.targets), message.moved_unix_s, message.mover
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
    return AuditEntry(
        time_unix_s=message.time_unix_s,
        actor=message.actor,
        tenant=message.tenant,
        action=message.action,
        subject=message.subject,
        digest=message.digest,
        details=dict(message.details),
    )


def api_key(message: pb.Key) -> ApiKey:
    """A key without its secret."""
    return ApiKey(
        key_id=message.key_id,
        tenant=message.tenant,
        scopes=tuple(message.scopes),
        created_unix_s=message.created_unix_s,
        expires_unix_s=message.expires_unix_s,
        revoked=message.revoked,
        description=message.description,
    )


def tenant(message: pb.Tenant) -> Tenant:
    """A tenant with limits and use."""
    return Tenant(
        tenant=message.tenant,
        max_bytes=message.max_bytes,
        max_versions=message.max_versions,
        requests_per_s=message.requests_per_s,
        tokens_per_s=message.tokens_per_s,
        max_concurrent=message.max_concurrent,
        fairness_weight=message.fairness_weight or 1.0,
        used_bytes=message.used_bytes,
        used_versions=message.used_versions,
        signature_keys=tuple(message.signature_keys),
    )


def usage_entry(message: pb.UsageEntry) -> UsageEntry:
    """One line of a tenant's usage."""
    return UsageEntry(
        day=message.day,
        tenant=message.tenant,
        model=message.model,
        requests=message.requests,
        errors=message.errors,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        generated_tokens=message.generated_tokens,
        duration_s=message.duration_ms / 1000,
    )
