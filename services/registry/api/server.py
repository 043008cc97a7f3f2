"""RegistryService: converts messages, checks permissions and calls the parts of the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from loraplex.api.registry import TagTarget
from loraplex.errors import InvalidRequest, Unsupported
from loraplex.refs import Ref, check_name, check_tag, check_tenant, parse_name, parse_ref
from loraplex.units import counted
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.limits import MAX_REASON_CHARS, WAIT_S, check_chars
from loraplex_services.registry.access.lookup import Query, visible_batches
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api import convert
from loraplex_services.registry.api.admin import caller_access, page_size
from loraplex_services.registry.api.downloads import chunks_of
from loraplex_services.registry.api.publishing import PublishService
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.found import Cursor
from loraplex_services.registry.publish.metrics import WATCHERS
from loraplex_services.registry.publish.tags import MAX_SIDES, TagAddress, parse_expect

SERVICE_NAME = "loraplex.v1.RegistryService"
MAX_PAGE_BYTES = 4_000_000
"""Most bytes of the versions in a page of a list, unless a single one has more. With what surrounds
them, they fit the 4 MiB that gRPC clients receive unless told otherwise."""


class RegistryService(PublishService):
    """Each method checks rights, converts, and calls one part."""

    async def GetAdapter(
        self, request: pb.GetAdapterRequest, context: Any
    ) -> pb.GetAdapterResponse:
        access = caller_access()
        access.require("reader")
        ref = parse_ref(request.ref, access.tenant)
        found = await self._registry.lookup.resolve(
            ref, access, request.split_key, frozenset(request.base_ids)
        )
        return pb.GetAdapterResponse(
            version=convert.resolved_to_proto(found),
            tags=[convert.tag_to_proto(tag) for tag in found.tags],
        )

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Any
    ) -> pb.ListAdaptersResponse:
        access = caller_access()
        access.require("reader")
        query = Query(
            tenant=request.tenant and check_tenant(request.tenant, field="tenant"),
            name=request.name and check_name(request.name).lower(),
            name_prefix=request.name_prefix.lower(),
            base_id=request.base_id,
            labels=tuple(request.labels.items()),
            all_versions=request.all_versions,
        )
        page, cursor = await self._registry.lookup.page(
            query, access, page_size(request.page_size), convert.cursor_of(request.page_token)
        )
        response, num_bytes = pb.ListAdaptersResponse(), 0
        for number, entry in enumerate(page):
            message = convert.resolved_to_proto(entry)
            num_bytes += message.ByteSize()
            if num_bytes > MAX_PAGE_BYTES and number:
                cursor = Cursor.at(page[number - 1].version)
                break
            response.versions.append(message)
        response.next_page_token = convert.page_token(cursor)
        return response

    async def SetTag(self, request: pb.SetTagRequest, context: Any) -> pb.SetTagResponse:
        access = caller_access()
        tenant, name = parse_name(request.name, access.tenant)
        access.require("publisher", tenant)
        address = await self._registry.tags.address(tenant, name, check_tag(request.tag))
        _check_one_move(request)
        WAIT_S.check("when_loaded_s", request.when_loaded_s)
        reason = check_chars("reason", request.reason, MAX_REASON_CHARS)
        if request.when_loaded_s and (request.rollback or request.delete):
            raise Unsupported.field(
                "when_loaded_s", request.when_loaded_s, "only moves to named versions can be staged"
            )
        if request.when_loaded_s and reason:
            raise Unsupported.field("reason", reason, "staged moves do not record one")
        expect = parse_expect(request.expect) if request.HasField("expect") else None
        tags = self._registry.tags
        if not request.delete:
            await tags.check_new(tenant, name, [address.tag])
        async with self._registry.lookup.explained(access):
            if request.rollback:
                version = request.rollback_version
                record = await tags.rollback(address, version, expect, access.actor, reason)
            elif request.delete:
                record = await tags.set(address, (), expect, access.actor, reason)
            else:
                targets = await self._targets(address, request.targets, access)
                if request.when_loaded_s and targets:
                    record = await self._registry.staging.begin(
                        address, targets, expect, access.actor, request.when_loaded_s
                    )
                else:
                    record = await tags.set(address, targets, expect, access.actor, reason)
        return pb.SetTagResponse(tag=convert.tag_to_proto(record))

    async def ListTagHistory(
        self, request: pb.ListTagHistoryRequest, context: Any
    ) -> pb.ListTagHistoryResponse:
        access = caller_access()
        access.require("reader")
        tenant, name = parse_name(request.name, access.tenant)
        address = TagAddress(tenant, name, check_tag(request.tag))
        record = await self._registry.tags.read(address)
        lookup = self._registry.lookup
        found = await lookup.newest(tenant, name)
        is_visible = access.may_see(tenant, found.adapter)
        shown = found.versions[0].shown_name if found.versions and is_visible else name
        if record is None or not is_visible:
            raise await lookup.missing(Ref(tenant, name, tag=address.tag), access)
        return pb.ListTagHistoryResponse(
            moves=[convert.move_to_proto(move, tenant, shown) for move in reversed(record.moves)]
        )

    async def DeleteAdapterVersion(
        self, request: pb.DeleteAdapterVersionRequest, context: Any
    ) -> pb.DeleteAdapterVersionResponse:
        access = caller_access()
        deletion, lookup = self._registry.deletion, self._registry.lookup
        if request.all:
            tenant, name = parse_name(request.ref, access.tenant, field="ref")
            access.require("publisher", tenant)
            async with lookup.explained(access):
                deleted = await deletion.adapter(tenant, name, access.actor, purge=request.purge)
        else:
            if ":" not in request.ref and "@" not in request.ref:
                raise InvalidRequest.field(
                    "ref", request.ref, f"names no version; try '{request.ref}:v1', or --all"
                )
            ref = parse_ref(request.ref, access.tenant)
            access.require("publisher", ref.tenant)
            number = ref.version
            if number is None:
                number = (await lookup.resolve(ref, access, to_change=True)).version.version
            async with lookup.explained(access):
                deleted = await deletion.version(
                    ref.tenant,
                    ref.name,
                    number,
                    access.actor,
                    force=request.force,
                    purge=request.purge,
                )
        return pb.DeleteAdapterVersionResponse(
            deleted=[convert.version_to_proto(record, None) for record in deleted]
        )

    async def DownloadAdapter(
        self, request: pb.DownloadAdapterRequest, context: Any
    ) -> AsyncIterator[pb.DownloadAdapterResponse]:
        access = caller_access()
        access.require("reader")
        found = await self._registry.lookup.resolve(parse_ref(request.ref, access.tenant), access)
        access.require_pull(found.version.tenant, found.adapter)
        for path in {*request.paths} - {file.path for file in found.version.files}:
            raise InvalidRequest.field("paths", path, "is not a file of this version")
        yield pb.DownloadAdapterResponse(version=convert.resolved_to_proto(found))
        chunks = chunks_of(
            self._registry.store,
            found.version,
            request.paths,
            reader_verifies=request.reader_verifies,
        )
        async for chunk in chunks:
            part = pb.FileChunk(path=chunk.path, offset=chunk.offset, data=chunk.data)
            yield pb.DownloadAdapterResponse(chunk=part)

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Any
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        access = caller_access()
        access.require("reader")
        last_token = request.resume_token
        with WATCHERS.track_inprogress():
            async for batch in visible_batches(
                self._registry.catalog, access, request.resume_token
            ):
                for message in convert.batch_to_protos(batch, last_token):
                    yield message
                last_token = batch.token

    async def RegisterBase(
        self, request: pb.RegisterBaseRequest, context: Any
    ) -> pb.RegisterBaseResponse:
        access = caller_access()
        access.require_service_or_root()
        base = convert.base_from_proto(request.base)
        stored = await self._registry.bases.register(base, replace=request.replace)
        return pb.RegisterBaseResponse(base=convert.base_to_proto(stored))

    async def ListBases(self, request: pb.ListBasesRequest, context: Any) -> pb.ListBasesResponse:
        caller_access().require("reader")
        bases = await self._registry.bases.all()
        return pb.ListBasesResponse(bases=[convert.base_to_proto(base) for base in bases])

    async def _targets(
        self, address: TagAddress, messages: Sequence[pb.TagTarget], access: Access
    ) -> list[TagTarget]:
        """Targets named by version or digest, weights of 0 meaning 1."""
        if not 1 <= len(messages) <= MAX_SIDES:
            description = f"give 1-{MAX_SIDES} versions to point at"
            raise InvalidRequest.field("targets", f"{len(messages)} targets", description)
        targets = []
        for message in messages:
            number = message.version
            if not number and not message.digest:
                raise InvalidRequest.field("targets", "", "name a version or a digest")
            if not number:
                ref = parse_ref(f"{address.scope}@{message.digest}", field="targets.digest")
                found = await self._registry.lookup.resolve(ref, access, to_change=True)
                number = found.version.version
            targets.append(TagTarget(number, message.digest, message.weight or 1))
        if len({target.version for target in targets}) < len(targets):
            raise InvalidRequest.field("targets", address.tag, "must not name a version twice")
        return targets


def _check_one_move(request: pb.SetTagRequest) -> None:
    """Raises InvalidRequest if the fields ask for more than one move, of which one would be
    ignored."""
    if request.delete and request.rollback:
        raise InvalidRequest.field("rollback", True, "leave out either rollback or delete")
    if request.targets and (request.delete or request.rollback):
        description = "must be empty with delete and with rollback"
        raise InvalidRequest.field("targets", counted(len(request.targets), "target"), description)
    if request.rollback_version and not request.rollback:
        version = request.rollback_version
        raise InvalidRequest.field("rollback_version", version, "needs rollback")


def service(registry: Registry) -> grpc_server.Service:
    """The service for `grpc_server.start`."""
    add = registry_pb2_grpc.add_RegistryServiceServicer_to_server
    return add, RegistryService(registry), SERVICE_NAME
