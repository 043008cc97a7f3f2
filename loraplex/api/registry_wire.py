"""Converts the types of `loraplex.api.registry` to and from the messages of the registry.

The registry's own documents hold more (operations, secrets, tombstones) under names that stored
ones have; what only the registry sends is converted where it speaks gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.api.registry import (
    AdapterFile,
    AdapterVersion,
    BaseModel,
    Change,
    Sharing,
    Tag,
    TagMove,
    TagTarget,
    UsageEntry,
)
from loraplex.api.tenants import Tenant
from loraplex.api.wire import from_message, to_message, violations_from_proto
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


def adapter_version(message: pb.AdapterVersion) -> AdapterVersion:
    """A version record."""
    return from_message(
        message,
        AdapterVersion,
        visibility=_VISIBILITY.get(message.visibility, "private"),
        files=tuple(AdapterFile(f.path, f.size, f.sha256) for f in message.files),
        warnings=violations_from_proto(message.warnings),
        task=message.pooling.task_type or "CAUSAL_LM",
        num_labels=message.pooling.num_labels,
    )


def sharing(name: str, message: pb.SetSharingResponse) -> Sharing:
    """The sharing of the adapter `name`."""
    return Sharing(
        name,
        _VISIBILITY.get(message.visibility, "private"),
        tuple(message.shared_with),
        message.pullable,
    )


def visibility_number(name: str) -> pb.Visibility:
    """The wire form of "private", "shared" or "public"; "" keeps the present one."""
    return _VISIBILITY_NUMBER[name]


def tag(message: pb.Tag) -> Tag:
    """A tag with its targets."""
    pending = targets(message.pending)
    return from_message(message, Tag, targets=targets(message.targets), pending=pending)


def targets(messages: Iterable[pb.TagTarget]) -> tuple[TagTarget, ...]:
    """The targets of a tag. A weight of 0 means 1."""
    return tuple(TagTarget(t.version, t.digest, t.weight or 1) for t in messages)


def targets_to_proto(targets: Iterable[TagTarget]) -> list[pb.TagTarget]:
    """The inverse."""
    return [pb.TagTarget(version=t.version, digest=t.digest, weight=t.weight) for t in targets]


def tag_move(message: pb.TagMove) -> TagMove:
    """One past move of a tag."""
    return from_message(message, TagMove, targets=targets(message.targets))


def base_model(message: pb.Base) -> BaseModel:
    """A registered base, without its list of modules."""
    geometry = message.geometry
    return from_message(
        message,
        BaseModel,
        model_type=geometry.model_type,
        fingerprint=geometry.fingerprint,
        num_layers=geometry.num_layers,
        vocab_size=geometry.vocab_size,
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


def tenant(message: pb.Tenant) -> Tenant:
    """A tenant with limits and use. A fairness weight of 0 means 1."""
    return from_message(message, Tenant, fairness_weight=message.fairness_weight or 1.0)


def usage_entry(message: pb.UsageEntry) -> UsageEntry:
    """One line of a tenant's usage."""
    return from_message(message, UsageEntry, duration_s=message.duration_ms / 1000)


def usage_entry_to_proto(entry: UsageEntry) -> pb.UsageEntry:
    """The inverse, to the millisecond."""
    return to_message(entry, pb.UsageEntry, duration_ms=round(entry.duration_s * 1000))
