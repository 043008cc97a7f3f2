"""Signatures of versions, kept as documents beside them: the versions themselves never change.

The registry checks that a signature is of the right form and over exactly the version's files.
Whose key it is, and whether the mathematics hold, is for those to say who know the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.errors import ResourceExhausted
from loraplex.signature_bundle import check_files, parse_bundle
from services.common.objects import ObjectStore
from services.registry import documents, layout
from services.registry.audit import Audit
from services.registry.clock import now_s
from services.registry.records import SignatureRecord, VersionRecord

MAX_SIGNATURES = 32
"""Of one version."""


class Signatures:
    """Keeps and finds them."""

    def __init__(self, store: ObjectStore, audit: Audit) -> None:
        self._store = store
        self._audit = audit

    async def attach(self, version: VersionRecord, raw: bytes, actor: str) -> SignatureRecord:
        """Keep a bundle; a later one by the same key takes its place.

        Raises:
            InvalidRequest: it is malformed, or over other files.
            ResourceExhausted: the version has 32 signatures.
        """
        bundle = parse_bundle(raw)
        check_files(bundle, {file.path: file.sha256 for file in version.files})
        held = await self.of(version)
        others = [record for record in held if record.key_sha256 != bundle.key_sha256]
        if len(others) >= MAX_SIGNATURES:
            raise ResourceExhausted(f"a version has at most {MAX_SIGNATURES} signatures")
        record = SignatureRecord(bundle.key_sha256, raw.decode(), actor, now_s())
        place = (version.tenant, version.name, version.version)
        key = layout.signature(*place, bundle.key_sha256)
        await documents.change(self._store, key, SignatureRecord, lambda _: record)
        await self._audit.write(
            actor,
            version.tenant,
            "version.sign",
            f"{version.tenant}/{version.name}:v{version.version}",
            digest=version.digest,
            details={"key_sha256": bundle.key_sha256},
        )
        return record

    async def of(self, version: VersionRecord) -> Sequence[SignatureRecord]:
        """The signatures of a version, ordered by key."""
        prefix = layout.signatures_of(version.tenant, version.name, version.version)
        return await documents.read_folder(self._store, prefix, SignatureRecord)
