"""The methods of the registry client for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from loraplex.adapter_format import geometry_from_folder
from loraplex.adapter_format.base_types import check_served_type
from loraplex.adapter_format.geometry import Geometry
from loraplex.api import registry_wire
from loraplex.api.fields import same_fields
from loraplex.api.format_wire import geometry_from_proto, geometry_to_proto
from loraplex.api.registry import ApiKey, AuditEntry, BaseModel, Certificate, Collected, Reindexed
from loraplex.api.tenants import Tenant, TenantLimits
from loraplex.api.wire import from_message, to_message
from loraplex.client.channel import Channel
from loraplex.errors import NotFound
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

PAGE_SIZE = 500
LONG_TIMEOUT_S = 3600.0
"""Timeout of garbage collection and reindexing, which read the whole store."""


class RegistryAdmin:
    """Bases, keys, tenants, audit, certificates and upkeep. Reached as `RegistryClient.admin`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def _stub(self) -> registry_pb2_grpc.RegistryServiceStub:
        return self._channel.stub(registry_pb2_grpc.RegistryServiceStub)

    async def add_base(
        self,
        folder: str | Path,
        base_id: str,
        *,
        aliases: Sequence[str] = (),
        max_lora_rank: int = 0,
        replace: bool = False,
    ) -> BaseModel:
        """Register the geometry of a base from its folder. No weights are read.

        Raises:
            InvalidRequest: a file is damaged, or the base is of a type that is not served.
        """
        geometry = geometry_from_folder(Path(folder))
        check_served_type(geometry.model_type, (module.name for module in geometry.modules))
        base = pb.Base(
            base_id=base_id,
            geometry=geometry_to_proto(geometry),
            aliases=aliases,
            max_lora_rank=max_lora_rank,
        )
        request = pb.RegisterBaseRequest(base=base, replace=replace)
        answer = await self._channel.call(self._stub.RegisterBase, request)
        return registry_wire.base_model(answer.base)

    async def bases(self) -> Sequence[BaseModel]:
        """Known bases, ordered by id."""
        answer = await self._channel.call(self._stub.ListBases, pb.ListBasesRequest())
        return [registry_wire.base_model(base) for base in answer.bases]

    async def geometry(self, base_id: str) -> Geometry:
        """The geometry of a base. Raises NotFound if the registry does not know the base."""
        answer = await self._channel.call(self._stub.ListBases, pb.ListBasesRequest())
        for base in answer.bases:
            if base_id in (base.base_id, *base.aliases):
                return geometry_from_proto(base.geometry)
        known = ", ".join(base.base_id for base in answer.bases) or "none"
        raise NotFound(f"base {base_id!r} is not registered (registered: {known})")

    async def collect_garbage(self, *, dry_run: bool = False) -> Collected:
        """Delete uploads without a write for a day, and files that no version refers to and that
        were not written for an hour. Those of a deleted version are kept for 7 days."""
        request = pb.CollectGarbageRequest(dry_run=dry_run)
        answer = await self._channel.call(self._stub.CollectGarbage, request, LONG_TIMEOUT_S)
        return from_message(answer, Collected)

    async def reindex(self) -> Reindexed:
        """Rebuild the metadata index from the objects."""
        answer = await self._channel.call(self._stub.Reindex, pb.ReindexRequest(), LONG_TIMEOUT_S)
        return from_message(answer, Reindexed)

    async def audit(self, tenant: str = "") -> AsyncIterator[AuditEntry]:
        """Changes by all callers, newest first."""
        request = pb.ListAuditRequest(page_size=PAGE_SIZE, tenant=tenant)
        async for page in self._channel.pages(self._stub.ListAudit, request):
            for entry in page.entries:
                yield from_message(entry, AuditEntry)

    async def set_certificate(self, ref: str, certificate: Certificate) -> Certificate:
        """Store a result of `divergence.measure` with a version; returns the certificate as
        stored."""
        request = pb.SetCertificateRequest(
            ref=ref, certificate=to_message(certificate, pb.Certificate)
        )
        answer = await self._channel.call(self._stub.SetCertificate, request)
        return from_message(answer.certificate, Certificate)

    async def certificates(self, ref: str) -> Sequence[Certificate]:
        """The certificates of a version."""
        request = pb.ListCertificatesRequest(ref=ref)
        answer = await self._channel.call(self._stub.ListCertificates, request)
        return [from_message(message, Certificate) for message in answer.certificates]

    async def create_key(
        self, tenant: str, scopes: Sequence[str], ttl_s: float = 0.0, description: str = ""
    ) -> tuple[ApiKey, str]:
        """Create a key; returns it and its token, which cannot be read again."""
        request = pb.CreateKeyRequest(
            tenant=tenant, scopes=scopes, ttl_s=ttl_s, description=description
        )
        answer = await self._channel.call(self._stub.CreateKey, request)
        return from_message(answer.key, ApiKey), answer.token

    async def create_first_key(self) -> tuple[ApiKey, str]:
        """Create the first admin key; returns it and its token. Raises AlreadyExists if it was
        created before, and PermissionDenied on another machine than the registry's."""
        answer = await self._channel.call(self._stub.CreateFirstKey, pb.CreateFirstKeyRequest())
        return from_message(answer.key, ApiKey), answer.token

    async def keys(self, tenant: str = "") -> Sequence[ApiKey]:
        """Keys of a tenant, without secrets."""
        request = pb.ListKeysRequest(tenant=tenant, page_size=1000)
        pages = self._channel.pages(self._stub.ListKeys, request)
        return [from_message(key, ApiKey) async for page in pages for key in page.keys]

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key. It becomes invalid everywhere within seconds."""
        request = pb.RevokeKeyRequest(key_id=key_id)
        answer = await self._channel.call(self._stub.RevokeKey, request)
        return from_message(answer.key, ApiKey)

    async def set_tenant(self, tenant: Tenant, fields: Collection[str] = ()) -> Tenant:
        """Create a tenant, or change the given `fields` of it; empty = all fields."""
        message = pb.Tenant(**same_fields(tenant, TenantLimits))
        request = pb.SetTenantRequest(tenant=message, fields=fields)
        answer = await self._channel.call(self._stub.SetTenant, request)
        return registry_wire.tenant(answer.tenant)

    async def tenants(self) -> Sequence[Tenant]:
        """All tenants with their limits and usage."""
        answer = await self._channel.call(self._stub.ListTenants, pb.ListTenantsRequest())
        return [registry_wire.tenant(tenant) for tenant in answer.tenants]
