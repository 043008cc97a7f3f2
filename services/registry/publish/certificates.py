"""Certificates of versions, kept as separate documents: the versions themselves never change.

A certificate records a measurement by the operator, or by somebody who may publish the adapter. The
registry has no weights to measure with, and keeps it as a statement of that key. Only certificates
of the operator count for a tenant's bound (`tag_rules`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

from loraplex.api.registry import Certificate
from loraplex.errors import InvalidRequest, PermissionDenied, ResourceExhausted
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.records import VersionRecord

MAX_CERTIFICATES = 32
"""Most certificates of one version."""
MAX_NAME_CHARS = 200


class Certificates:
    """Stores and finds certificates."""

    def __init__(self, store: ObjectStore, audit: Audit) -> None:
        self._store = store
        self._audit = audit

    async def of(self, version: VersionRecord) -> Sequence[Certificate]:
        """The certificates of a version, ordered by their subject."""
        address = version.tenant, version.name, version.version
        prefix = layout.certificates_of(*address)
        records = await documents.read_folder(self._store, prefix, Certificate)
        return sorted(records, key=_subject)

    async def keep(self, version: VersionRecord, record: Certificate) -> None:
        """Store a certificate; it replaces an earlier one about the same measurement.

        Raises:
            InvalidRequest: a value cannot be what was measured.
            PermissionDenied: it would replace one by the operator.
            ResourceExhausted: the version has 32.
        """
        _check(record)
        others = {_subject(other) for other in await self.of(version)} - {_subject(record)}
        if len(others) >= MAX_CERTIFICATES:
            raise ResourceExhausted(
                f"a version has at most {MAX_CERTIFICATES} certificates; repeat an earlier "
                "measurement, which replaces its certificate"
            )
        sha256 = hashlib.sha256("\n".join(_subject(record)).encode()).hexdigest()
        key = layout.certificate(version.tenant, version.name, version.version, sha256)

        def step(current: Certificate | None) -> Certificate:
            if current is not None and current.by_operator and not record.by_operator:
                raise PermissionDenied(
                    "the operator has certified the version for this base, reference and probe; "
                    "certify with other texts or another reference"
                )
            return record

        await documents.change(self._store, key, Certificate, step)
        kl = f"{record.mean_kl:.3g}"
        await self._audit.write_version(
            record.creator, "version.certify", version, base_id=record.base_id, mean_kl=kl
        )


def _subject(record: Certificate) -> tuple[str, ...]:
    """The subject of a certificate. Objects are named after this."""
    return record.base_id, record.reference, record.probe_sha256, record.quantization


def _check(record: Certificate) -> None:
    """Raises InvalidRequest."""
    for name in ("base_id", "reference"):
        text = getattr(record, name)
        if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
            why = f"must have 1 to {MAX_NAME_CHARS} characters, on one line"
            raise InvalidRequest.field(f"certificate.{name}", text[:MAX_NAME_CHARS], why)
    if not re.fullmatch(r"[a-z0-9-]{0,32}", record.quantization):
        why = 'must be a name such as "int8", or empty for a base that is served as published'
        value = record.quantization[:MAX_NAME_CHARS]
        raise InvalidRequest.field("certificate.quantization", value, why)
    if not re.fullmatch(r"[0-9a-f]{64}", record.probe_sha256):
        why = "must be 64 hexadecimal digits"
        raise InvalidRequest.field("certificate.probe_sha256", record.probe_sha256[:100], why)
    if record.num_tokens < 1:
        raise InvalidRequest.field("certificate.num_tokens", record.num_tokens, "must be above 0")
    for name, largest in (("mean_kl", math.inf), ("max_kl", math.inf), ("top1_agreement", 1.0)):
        value = getattr(record, name)
        if not (math.isfinite(value) and 0 <= value <= largest):
            why = "must be finite, and not negative" + " nor above 1" * (largest == 1)
            raise InvalidRequest.field(f"certificate.{name}", value, why)
