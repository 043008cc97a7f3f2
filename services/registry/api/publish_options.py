"""Reads the options of a publication from messages, and checks labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loraplex.adapter_format import rope_scaling
from loraplex.adapter_format.serving_fields import ROPE_FIELD
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from loraplex.refs import LATEST, check_tag, parse_name, parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.limits import EPHEMERAL_S, KEPT_VERSIONS, WAIT_S
from loraplex_services.registry.access.sharing import MAX_LABELS, check_label_bytes
from loraplex_services.registry.access.signatures import Offered
from loraplex_services.registry.publish.uploads import Options
from loraplex_services.registry.records import (
    PRIVATE,
    PUBLIC,
    SHARED,
)

VISIBILITY = {
    PRIVATE: pb.VISIBILITY_PRIVATE,
    SHARED: pb.VISIBILITY_SHARED,
    PUBLIC: pb.VISIBILITY_PUBLIC,
}


MAX_TAGS = 64


MAX_LABEL_KEY_CHARS = 63


MAX_LABEL_VALUE_CHARS = 256


def options_from_proto(message: pb.PublishOptions, tenant: str) -> Options:
    """The options that a client requested for an upload. Raises InvalidRequest with the field."""
    owner, name = parse_name(message.name, tenant, field="options.name")
    if len(message.tags) > MAX_TAGS:
        raise InvalidRequest.field("options.tags", len(message.tags), f"at most {MAX_TAGS} tags")
    tags = [check_tag(tag, field="options.tags") for tag in message.tags]
    if not message.no_latest:
        tags.append(LATEST)
    WAIT_S.check("options.when_loaded_s", message.when_loaded_s)
    KEPT_VERSIONS.check("options.keep_versions", message.keep_versions)
    EPHEMERAL_S.check("options.ttl_s", message.ttl_s)
    if message.ttl_s and message.visibility == pb.VISIBILITY_PUBLIC:
        raise InvalidRequest.field(
            "options.visibility",
            "public",
            "an ephemeral version is private; leave out ttl_s or public",
        )
    if message.visibility == pb.VISIBILITY_SHARED:
        description = "an upload makes an adapter private or public; share it afterwards"
        raise InvalidRequest.field("options.visibility", "shared", description)
    check_labels(message.labels, "options.labels")
    if message.parent:
        parse_ref(message.parent, owner, field="options.parent")
    return Options(
        tenant=owner,
        name=name,
        tags=tuple(dict.fromkeys(tags)),
        base_id=message.base_id,
        visibility=visibility_from_proto(message.visibility, "options.visibility"),
        labels=dict(sorted(message.labels.items())),
        strict=message.strict,
        allow_missing=message.allow_missing,
        parent=message.parent,
        when_loaded_s=message.when_loaded_s,
        keep_versions=message.keep_versions,
        spelling=message.name.rpartition("/")[2],
        ttl_s=message.ttl_s,
    )


def visibility_from_proto(number: pb.Visibility, field: str) -> int:
    """The visibility as records have it; 0 if unspecified. Raises Unsupported for a value of a
    later version."""
    if number not in pb.Visibility.values():
        raise Unsupported.field(field, number, "is a visibility that this version does not know")
    return int(number)


def offered_from_proto(messages: Iterable[pb.Signature]) -> list[Offered]:
    """Signatures as a publisher sends them."""
    return [Offered(message.bundle, message.public_key) for message in messages]


def check_labels(labels: Mapping[str, str], field: str) -> None:
    """Raises InvalidRequest for too many or too long labels, and for one that is not served."""
    if len(labels) > MAX_LABELS:
        raise InvalidRequest.field(field, f"{len(labels)} labels", f"at most {MAX_LABELS}")
    for key, value in labels.items():
        most = rope_scaling.MAX_BYTES if key == ROPE_FIELD else MAX_LABEL_VALUE_CHARS
        if not 0 < len(key) <= MAX_LABEL_KEY_CHARS or len(value) > most:
            description = f"keys have 1-{MAX_LABEL_KEY_CHARS} characters, values at most {most}"
            raise InvalidRequest.field(f"{field}[{key[:80]}]", value, description)
    check_label_bytes(labels, field)
    if ROPE_FIELD in labels:
        try:
            rope_scaling.parse(labels[ROPE_FIELD])
        except InvalidAdapter as error:
            field, why = f"{field}[{ROPE_FIELD}]", error.message
            raise InvalidRequest.field(field, labels[ROPE_FIELD], why) from None


def check_adapter_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidRequest as `check_labels`, and for one that only a version can have."""
    check_labels(labels, "set_labels")
    if ROPE_FIELD in labels:
        why = "belongs to a version, which never changes; publish one with this label"
        raise InvalidRequest.field(f"set_labels[{ROPE_FIELD}]", "", why)
