"""The rules of a tenant for versions that tags point at: a signature, and a certificate by the
operator that limits the divergence on the served base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraplex.api.registry import Certificate
from loraplex.api.tenants import TenantLimits
from loraplex.errors import NotCertified
from loraplex_services.registry.access.signatures import Signatures
from loraplex_services.registry.access.tenants import Tenants
from loraplex_services.registry.publish.certificates import Certificates
from loraplex_services.registry.records import VersionRecord

_WAY_OUT = "have the operator run 'registry certify'"


@dataclass(frozen=True, slots=True, eq=False)
class TagRules:
    """Checks versions before tags point at them. A new rule moves no existing tag."""

    tenants: Tenants
    signatures: Signatures
    certificates: Certificates

    async def check(self, version: VersionRecord) -> None:
        """Check that a tag may point at a version.

        Raises:
            PermissionDenied: it lacks a signature that its tenant requires.
            NotCertified: it lacks a certificate of the operator, or diverges too much.
        """
        await self.signatures.check(version)
        if max_kl := (await self.tenants.get(version.tenant)).max_kl:
            await self._check_kl(version, max_kl)

    async def barred(self, tenant: str, versions: Sequence[VersionRecord]) -> set[int]:
        """The numbers of the versions that no tag may point at."""
        found = await self.signatures.unsigned(tenant, versions)
        if max_kl := (await self.tenants.get(tenant)).max_kl:
            for version in versions:
                try:
                    await self._check_kl(version, max_kl)
                except NotCertified:
                    found.add(version.version)
        return found

    def check_upload(self, limits: TenantLimits, *, moves_tags: bool) -> None:
        """Raises NotCertified for an upload that moves tags: nobody has measured it yet."""
        tenant, max_kl = limits.tenant, limits.max_kl
        if moves_tags and max_kl:
            raise NotCertified.of(
                "not measured",
                f"tenant {tenant!r} has a bound of {max_kl:g} nats per token, and no tag may point "
                "at a version that is not certified: upload with --no-latest and without --tag, "
                f"{_WAY_OUT}, then move the tags",
            )

    async def _check_kl(self, version: VersionRecord, max_kl: float) -> None:
        what = version.ref
        counted = latest_by_operator(version.base_id, await self.certificates.of(version))
        if not counted:
            raise NotCertified.of(
                "not measured",
                f"{what} has no certificate by the operator on base {version.base_id!r}, and its "
                f"tenant has a bound of {max_kl:g} nats per token; {_WAY_OUT}",
            )
        worst = max(counted, key=lambda certificate: certificate.mean_kl)
        if worst.mean_kl > max_kl:
            scheme = f" in {worst.quantization}" if worst.quantization else ""
            raise NotCertified.of(
                f"{worst.mean_kl:.3g}",
                f"{what} on base {version.base_id!r}{scheme} diverges by {worst.mean_kl:.3g} nats "
                f"per token from {worst.reference}, and its tenant has a bound of {max_kl:g}; tag "
                f"another version, {_WAY_OUT} again, or have the bound changed with 'registry "
                "tenants set --max-kl'",
            )


def latest_by_operator(base_id: str, certificates: Iterable[Certificate]) -> list[Certificate]:
    """The latest certificate by the operator for each quantisation of the base at load."""
    latest: dict[str, Certificate] = {}
    for one in sorted(certificates, key=lambda one: one.created_unix_s):
        if one.by_operator and one.base_id == base_id:
            latest[one.quantization] = one
    return list(latest.values())
