"""The admin methods of RegistryService."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from loraplex.api.fields import same_fields
from loraplex.api.tenants import TenantLimits
from loraplex.api.wire import to_message
from loraplex.errors import InvalidRequest, PermissionDenied
from loraplex.refs import check_bare, check_tag, check_tenant, parse_name, parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.callers import current_caller
from loraplex_services.common.limits import MAX_DESCRIPTION_CHARS, check_chars
from loraplex_services.registry.access.auth import is_local_peer
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.sharing import (
    MAX_LABELS,
    SharingChange,
    check_num_recipients,
)
from loraplex_services.registry.access.signatures import Offered
from loraplex_services.registry.api import convert, publish_options
from loraplex_services.registry.api.usage import (
    entries_to_proto,
    report_from_proto,
    since_from_proto,
    used_adapters,
)
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.redis_calls import CatalogDown

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_FAILURE_CHARS = 1000


class AdminService(registry_pb2_grpc.RegistryServiceServicer):
    """Signatures, certificates, keys, tenants, sharing, usage, audit, collection and index."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def CollectGarbage(
        self, request: pb.CollectGarbageRequest, context: Any
    ) -> pb.CollectGarbageResponse:
        access = caller_access()
        access.require_root()
        collected = await self._registry.collector.collect(dry_run=request.dry_run)
        if not request.dry_run:
            details = {"objects": str(collected.deleted_objects)}
            await self._registry.audit.write(
                access.actor, access.tenant, "gc", "blobs", details=details
            )
        return pb.CollectGarbageResponse(
            deleted_objects=collected.deleted_objects,
            deleted_bytes=collected.deleted_bytes,
            kept_objects=collected.kept_objects,
        )

    async def Reindex(self, request: pb.ReindexRequest, context: Any) -> pb.ReindexResponse:
        caller_access().require_root()
        epoch, versions, tags, bases = await self._registry.indexer.rebuild()
        return pb.ReindexResponse(versions=versions, tags=tags, bases=bases, epoch=epoch)

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditResponse:
        access = caller_access()
        tenant = request.tenant or ("" if access.is_root else access.tenant)
        access.require("admin", tenant or None)
        entries, token = await self._registry.audit.page(
            tenant, page_size(request.page_size), request.page_token
        )
        return pb.ListAuditResponse(
            entries=[convert.audit_to_proto(entry) for entry in entries], next_page_token=token
        )

    async def AttachSignature(
        self, request: pb.AttachSignatureRequest, context: Any
    ) -> pb.AttachSignatureResponse:
        access = caller_access()
        ref = parse_ref(request.ref, access.tenant)
        found = await self._registry.lookup.resolve(ref, access, to_change=True)
        access.require("publisher", found.version.tenant)
        signatures = self._registry.signatures
        offered = Offered(request.bundle, request.public_key)
        record = await signatures.attach(found.version, offered, access.actor)
        version = convert.resolved_to_proto(found)
        version.signers[:] = await signatures.signers(found.version)
        return pb.AttachSignatureResponse(
            version=version, signature=convert.signature_to_proto(record)
        )

    async def ListSignatures(
        self, request: pb.ListSignaturesRequest, context: Any
    ) -> pb.ListSignaturesResponse:
        access = caller_access()
        access.require("reader")
        found = await self._registry.lookup.resolve(parse_ref(request.ref, access.tenant), access)
        signatures = self._registry.signatures
        version = convert.resolved_to_proto(found)
        version.signers[:] = await signatures.signers(found.version)
        return pb.ListSignaturesResponse(
            version=version,
            signatures=[convert.signature_to_proto(r) for r in await signatures.of(found.version)],
            policy_keys=(await signatures.policy(found.version.tenant)).values(),
        )

    async def SetCertificate(
        self, request: pb.SetCertificateRequest, context: Any
    ) -> pb.SetCertificateResponse:
        access = caller_access()
        ref = parse_ref(request.ref, access.tenant)
        found = await self._registry.lookup.resolve(ref, access, to_change=True)
        if not access.sees_all:
            access.require("publisher", found.version.tenant)
        record = convert.certificate_from_proto(request.certificate, access)
        await self._registry.certificates.keep(found.version, record)
        return pb.SetCertificateResponse(
            version=convert.resolved_to_proto(found),
            certificate=to_message(record, pb.Certificate),
        )

    async def ListCertificates(
        self, request: pb.ListCertificatesRequest, context: Any
    ) -> pb.ListCertificatesResponse:
        access = caller_access()
        access.require("reader")
        found = await self._registry.lookup.resolve(parse_ref(request.ref, access.tenant), access)
        records = await self._registry.certificates.of(found.version)
        if not access.owns(found.version.tenant):
            records = [dataclasses.replace(record, creator="") for record in records]
        return pb.ListCertificatesResponse(
            certificates=[to_message(record, pb.Certificate) for record in records]
        )

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Any) -> pb.CreateKeyResponse:
        access = caller_access()
        tenant = check_tenant(request.tenant or access.tenant, field="tenant")
        access.require("admin", tenant)
        record, token = await self._registry.keys.create(
            tenant, request.scopes, request.ttl_s, request.description
        )
        await self._registry.audit.write(
            access.actor,
            tenant,
            "key.create",
            record.key_id,
            details={"scopes": " ".join(record.scopes)},
        )
        return pb.CreateKeyResponse(key=convert.key_to_proto(record), token=token)

    async def CreateFirstKey(
        self, request: pb.CreateFirstKeyRequest, context: Any
    ) -> pb.CreateFirstKeyResponse:
        if not is_local_peer(context.peer()):
            raise PermissionDenied(
                "the first admin key is made on the registry's own machine; run the command "
                "there, or name a file with one in LORAPLEX_ADMIN_KEY_FILE"
            )
        record, token = await self._registry.keys.create_first()
        await self._registry.audit.write("", record.tenant, "key.bootstrap", record.key_id)
        return pb.CreateFirstKeyResponse(key=convert.key_to_proto(record), token=token)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:
        access = caller_access()
        tenant = request.tenant or ("" if access.is_root else access.tenant)
        access.require("admin", tenant or None)
        records, token = await self._registry.keys.page(
            tenant, page_size(request.page_size or MAX_PAGE_SIZE), request.page_token
        )
        return pb.ListKeysResponse(
            keys=[convert.key_to_proto(record) for record in records], next_page_token=token
        )

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Any) -> pb.RevokeKeyResponse:
        access = caller_access()
        access.require("admin")
        record = await self._registry.keys.revoke(request.key_id, access)
        await self._registry.audit.write(access.actor, record.tenant, "key.revoke", record.key_id)
        return pb.RevokeKeyResponse(key=convert.key_to_proto(record))

    async def SetTenant(self, request: pb.SetTenantRequest, context: Any) -> pb.SetTenantResponse:
        access = caller_access()
        tenant = check_tenant(request.tenant.tenant, field="tenant.tenant")
        if {*request.fields} == {"signature_keys"}:
            access.require("admin", tenant)
        else:
            access.require_root()
        wanted = convert.tenant_from_proto(request.tenant)
        record = await self._registry.tenants.set(wanted, request.fields)
        limits = same_fields(record, TenantLimits)
        limits |= {"signature_keys": len(record.signature_keys)}
        details = {name: str(limit) for name, limit in limits.items() if name != "tenant"}
        await self._registry.audit.write(
            access.actor, record.tenant, "tenant.set", record.tenant, details=details
        )
        return pb.SetTenantResponse(tenant=await self._tenant(record.tenant))

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any
    ) -> pb.ListTenantsResponse:
        access = caller_access()
        if not access.sees_all:
            access.require("admin", request.tenant or None)
        names = {request.tenant or access.tenant}
        if access.sees_all and not request.tenant:
            names |= await self._registry.tenants.names()
        return pb.ListTenantsResponse(tenants=[await self._tenant(name) for name in sorted(names)])

    async def SetSharing(
        self, request: pb.SetSharingRequest, context: Any
    ) -> pb.SetSharingResponse:
        access = caller_access()
        tenant, name = parse_name(request.name, access.tenant)
        access.require("publisher", tenant)
        check_num_recipients(len(request.shared_with))
        wanted = SharingChange(
            publish_options.visibility_from_proto(request.visibility, "visibility"),
            tuple(check_tenant(other, field="shared_with") for other in request.shared_with),
            request.pullable if request.HasField("pullable") else None,
        )
        async with self._registry.lookup.explained(access):
            record = await self._registry.sharing.set(tenant, name, wanted, access.actor)
        return convert.sharing_to_proto(record)

    async def DescribeAdapter(
        self, request: pb.DescribeAdapterRequest, context: Any
    ) -> pb.DescribeAdapterResponse:
        access = caller_access()
        tenant, name = parse_name(request.name, access.tenant)
        access.require("publisher", tenant)
        publish_options.check_adapter_labels(request.set_labels)
        check_chars("description", request.description, MAX_DESCRIPTION_CHARS)
        if (num_removed := len(request.remove_labels)) > MAX_LABELS:
            why = f"an adapter has at most {MAX_LABELS} labels"
            raise InvalidRequest.field("remove_labels", f"{num_removed} keys", why)
        async with self._registry.lookup.explained(access):
            record = await self._registry.sharing.describe(
                tenant,
                name,
                request.description if request.HasField("description") else None,
                request.set_labels,
                request.remove_labels,
                access.actor,
            )
        return pb.DescribeAdapterResponse(description=record.description, labels=record.labels)

    async def CheckKey(self, request: pb.CheckKeyRequest, context: Any) -> pb.CheckKeyResponse:
        caller_access().require_service_or_root()
        keys = self._registry.keys
        if request.key_id and not request.token:
            caller = await keys.check_id(request.key_id)
        else:
            caller = await keys.check(request.token)
        record = await keys.get(caller.key_id)
        return pb.CheckKeyResponse(key=convert.key_to_proto(record))

    async def FinishStagedMove(
        self, request: pb.FinishStagedMoveRequest, context: Any
    ) -> pb.FinishStagedMoveResponse:
        access = caller_access()
        access.require_service_or_root()
        tenant, name = parse_name(request.name, access.tenant)
        address = await self._registry.tags.address(tenant, name, check_tag(request.tag))
        failure = request.failure[:MAX_FAILURE_CHARS]
        record = await self._registry.staging.finish(
            address, request.generation, failure, access.actor
        )
        return pb.FinishStagedMoveResponse(tag=convert.tag_to_proto(record))

    async def RecordUsage(
        self, request: pb.RecordUsageRequest, context: Any
    ) -> pb.RecordUsageResponse:
        caller_access().require_service_or_root()
        days = report_from_proto(request)
        await self._registry.retention.used(used_adapters(request))
        await self._registry.usage.add(request.report_id, days)
        return pb.RecordUsageResponse()

    async def ListUsage(self, request: pb.ListUsageRequest, context: Any) -> pb.ListUsageResponse:
        access = caller_access()
        access.require("reader")
        tenant = request.tenant or access.tenant
        if request.all_tenants or tenant != access.tenant:
            access.require_service_or_root()
        today = datetime.datetime.now(datetime.UTC).date()
        wanted = "" if request.all_tenants else tenant
        since = since_from_proto(request.since, today)
        days = await self._registry.usage.read(since, today, wanted)
        entries = entries_to_proto(days, wanted, request.model)
        if not entries:  # the id of a base may look like a reference
            bases = await self._registry.bases.summaries()
            if request.model not in [base.base_id for base in bases]:
                check_bare(request.model, "model")
        return pb.ListUsageResponse(entries=entries)

    async def _tenant(self, tenant: str) -> pb.Tenant:
        record = await self._registry.tenants.get(tenant)
        try:
            used = await self._registry.catalog.usage(tenant)
        except CatalogDown:
            used = (0, 0)
        return to_message(record, pb.Tenant, used_bytes=used[0], used_versions=used[1])


def caller_access() -> Access:
    """The permissions of the current caller."""
    return Access.of(current_caller.get())


def page_size(wanted: int) -> int:
    """The number of entries to return. Raises InvalidRequest for too many."""
    if wanted > MAX_PAGE_SIZE:
        raise InvalidRequest.field("page_size", wanted, f"must be at most {MAX_PAGE_SIZE}")
    return wanted or DEFAULT_PAGE_SIZE
