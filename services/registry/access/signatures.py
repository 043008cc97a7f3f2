"""Signatures of versions, kept as separate documents: the versions themselves never change.

A signature is stored only if it has the right form and covers exactly the version's files. If its
public key is known, because it was sent along or is in the tenant's policy, the registry also
verifies the signature.

A tenant with signature keys requires a signature by any one of them (as sigstore's policies do) of
each new version and of each version that a tag is moved to. Existing tags do not move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex.api.tenants import TenantLimits
from loraplex.errors import (
    DataLoss,
    InvalidRequest,
    PermissionDenied,
    ResourceExhausted,
    Unsupported,
)
from loraplex.signature_bundle import check_files, parse_bundle
from loraplex.signing import key_sha256, parse_public_key, public_pem, verify
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.access.tenants import Tenants
from loraplex_services.registry.records import SignatureRecord, VersionRecord, now_s

MAX_SIGNATURES = 32
"""Most signatures of one version."""
MAX_KEYS = 16
"""Most keys in one tenant's policy."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A signature as its signer sends it."""

    bundle: bytes
    public_key: str = ""
    """PEM; may be empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Signatures:
    """Stores and finds signatures, and enforces the policies of tenants."""

    store: ObjectStore
    audit: Audit
    tenants: Tenants

    async def accepted(
        self, limits: TenantLimits, files: Sequence[File], offered: Sequence[Offered], actor: str
    ) -> tuple[SignatureRecord, ...]:
        """Check the signatures of an upload, by themselves and against its tenant's policy.

        Raises:
            InvalidRequest: a signature is malformed, or over other files.
            PermissionDenied: one is wrong, or none is by a key that the tenant requires.
        """
        if len(offered) > MAX_SIGNATURES:
            description = f"a version has at most {MAX_SIGNATURES} signatures"
            raise InvalidRequest.field(
                "options.signatures", f"{len(offered)} signatures", description
            )
        policy = policy_of(limits)
        records = tuple([_checked(one, files, policy, actor) for one in offered])
        self.check_upload(limits, records)
        return records

    async def attach(self, version: VersionRecord, offered: Offered, actor: str) -> SignatureRecord:
        """Store a signature, replacing an earlier one by the same key.

        Raises:
            InvalidRequest: it is malformed, or over other files.
            PermissionDenied: it was not made by the key that is named.
            ResourceExhausted: the version has 32 signatures.
        """
        policy = await self.policy(version.tenant)
        record = _checked(offered, version.files, policy, actor)
        await self.keep(version, [record])
        return record

    async def keep(self, version: VersionRecord, records: Sequence[SignatureRecord]) -> None:
        """Store checked signatures of a version."""
        held = await self.of(version) if records else []
        address = (version.tenant, version.name, version.version)
        for record in records:
            keys = {other.key_sha256 for other in held} | {r.key_sha256 for r in records}
            if len(keys) > MAX_SIGNATURES:
                raise ResourceExhausted(
                    f"a version has at most {MAX_SIGNATURES} signatures; sign with one of its keys"
                )
            if any(other.bundle == record.bundle for other in held):
                continue
            key = layout.signature(*address, record.key_sha256)
            await documents.change(self.store, key, SignatureRecord, _always(record))
            await self.audit.write_version(
                record.actor, "version.sign", version, key_sha256=record.key_sha256
            )

    async def of(self, version: VersionRecord) -> Sequence[SignatureRecord]:
        """The signatures of a version, ordered by key."""
        prefix = layout.signatures_of(version.tenant, version.name, version.version)
        return await documents.read_folder(self.store, prefix, SignatureRecord)

    async def signers(self, version: VersionRecord) -> tuple[str, ...]:
        """The keys whose signatures the registry verified, ordered."""
        kept = {record.key_sha256 for record in await self.of(version) if record.public_key}
        return tuple(sorted(kept | {*version.signers}))

    async def policy(self, tenant: str) -> dict[str, str]:
        """The keys of which a tenant requires one, as `policy_of` has them."""
        return policy_of(await self.tenants.get(tenant))

    def check_upload(self, limits: TenantLimits, signatures: Sequence[SignatureRecord]) -> None:
        """Check the signatures of an upload, which may be older than the policy of its tenant.
        Raises PermissionDenied."""
        verified = {record.key_sha256 for record in signatures if record.public_key}
        self._demand(limits.tenant, policy_of(limits), verified, "the upload")

    async def check(self, version: VersionRecord) -> None:
        """Whether a tag may point at a version. Raises PermissionDenied."""
        policy = await self.policy(version.tenant)
        if policy:
            signed = await self._signed_by(version, policy)
            self._demand(version.tenant, policy, signed, version.ref)

    async def unsigned(self, tenant: str, versions: Sequence[VersionRecord]) -> set[int]:
        """The numbers of the versions that no tag may point at under the tenant's policy."""
        policy = await self.policy(tenant)
        if not policy:
            return set()
        return {v.version for v in versions if not await self._signed_by(v, policy)}

    async def _signed_by(self, version: VersionRecord, policy: Mapping[str, str]) -> set[str]:
        """The keys of a policy that signed a version. Signatures kept before the policy named
        their key are verified here."""
        files = _by_path(version.files)
        signed = {*version.signers} & policy.keys()
        for record in await self.of(version):
            pem = policy.get(record.key_sha256)
            if pem and (record.public_key == pem or _holds(record, files, pem)):
                signed.add(record.key_sha256)
        return signed

    def _demand(self, tenant: str, policy: Mapping[str, str], signers: Set[str], what: str) -> None:
        if not policy or signers & policy.keys():
            return
        wanted = ", ".join(sorted(sha256[:12] for sha256 in policy))
        raise PermissionDenied(
            f"{what} is not signed by a key that tenant {tenant!r} requires ({wanted}); upload "
            "with --signing-key, or 'registry sign' the version first",
            reason="NOT_SIGNED",
        )


def policy_of(limits: TenantLimits) -> dict[str, str]:
    """The keys of which a tenant requires one, as PEM by sha256; empty = no requirement."""
    pems = limits.signature_keys
    return {key_sha256(parse_public_key(pem.encode(), "", "")): pem for pem in pems}


def checked_keys(pems: Sequence[str]) -> tuple[str, ...]:
    """The keys of a policy, without duplicates and normalised. Raises InvalidRequest."""
    if len(pems) > MAX_KEYS:
        description = f"a tenant has at most {MAX_KEYS} keys"
        raise InvalidRequest.field("tenant.signature_keys", f"{len(pems)} keys", description)
    keys = [
        public_pem(parse_public_key(pem.encode(), f"tenant.signature_keys[{index}]", pem[:64]))
        for index, pem in enumerate(pems)
    ]
    return tuple(dict.fromkeys(keys))


def _checked(
    offered: Offered, files: Sequence[File], policy: Mapping[str, str], actor: str
) -> SignatureRecord:
    """A record of a signature, verified if its key is known."""
    bundle = parse_bundle(offered.bundle)
    by_path = _by_path(files)
    check_files(bundle, by_path)
    pem = policy.get(bundle.key_sha256, offered.public_key)
    if pem:
        public = parse_public_key(pem.encode(), "public_key", pem[:64])
        if key_sha256(public) != bundle.key_sha256:
            description = f"differs from the key that the bundle names, {bundle.key_sha256}"
            raise InvalidRequest.field("public_key", key_sha256(public), description)
        verify(offered.bundle, by_path, public)
        pem = public_pem(public)
    return SignatureRecord(bundle.key_sha256, offered.bundle.decode(), actor, now_s(), pem)


def _holds(record: SignatureRecord, files: Mapping[str, str], pem: str) -> bool:
    try:
        verify(record.bundle.encode(), files, parse_public_key(pem.encode(), "", ""))
    except (PermissionDenied, DataLoss, Unsupported):
        return False
    return True


def _always(record: SignatureRecord) -> Callable[[SignatureRecord | None], SignatureRecord]:
    return lambda _: record


def _by_path(files: Sequence[File]) -> dict[str, str]:
    return {file.path: file.sha256 for file in files}
