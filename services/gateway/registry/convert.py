"""Converts the registry's messages to the gateway's plain types."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.adapter_format import File
from loraplex.adapter_format.added_tokens import TEXT_FILES
from loraplex.adapter_format.rope_scaling import RopeScaling, parse
from loraplex.api.format_wire import adapter_pooling_from_proto
from loraplex.errors import InvalidAdapter
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.registry.snapshot import Version

_MAX_LABELS = 16
_MAX_LABEL_CHARS = 64


def version_from_wire(message: registry_pb2.AdapterVersion) -> Version:
    """A registry's version record."""
    task, pooling = adapter_pooling_from_proto(message.pooling)
    return Version(
        tenant=message.tenant,
        name=message.name,
        number=message.version,
        digest=message.digest,
        base_id=message.base_id,
        base_fingerprint=message.base_fingerprint,
        created_unix_s=message.created_unix_s,
        max_rank=message.max_rank,
        deleted=message.deleted,
        is_public=message.visibility == registry_pb2.VISIBILITY_PUBLIC,
        shared_with=frozenset(message.shared_with),
        text_files=tuple(
            File(file.path, file.size, file.sha256)
            for file in message.files
            if file.path in TEXT_FILES
        ),
        task=task,
        pooling=pooling,
        rope_scaling=_rope_scaling(message.rope_scaling),
        eos_token_ids=tuple(message.eos_token_ids),
        is_ephemeral=message.expires_unix_s > 0,
        labels=_labels({**message.labels, **message.adapter_labels}),
    )


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The first labels, which the list of the console shows. Labels of 10,000 versions of one
    adapter may have 0.6 GB, and the page of a version asks the registry for them."""
    shown = sorted(labels.items())[:_MAX_LABELS]
    return tuple((key, value[:_MAX_LABEL_CHARS]) for key, value in shown)


def _rope_scaling(text: str) -> RopeScaling | None:
    """The rope scaling; None if there is none, or one that only a newer gateway would know: the
    workers then check it."""
    try:
        return parse(text) if text else None
    except InvalidAdapter:
        return None
