"""RegistryService: converts messages, checks permissions and calls the parts of the registry."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from loraplex.adapter_format.files import check_files
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.serving_fields import ROPE_FIELD, complete_config
from loraplex.api.format_wire import files_from_proto, violation_to_proto
from loraplex.api.registry import TagTarget
from loraplex.errors import DeadlineExceeded, InvalidRequest, NotFound, Unsupported
from loraplex.refs import check_name, check_tag, check_tenant, parse_name, parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.callers import current_caller
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.limits import MAX_REASON_CHARS, MAX_UPLOAD_IDLE_S, WAIT_S, check_chars
from loraplex_services.registry.access.lookup import Query, visible_batches
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api import convert
from loraplex_services.registry.api.admin import AdminService, caller_access, page_size
from loraplex_services.registry.api.downloads import chunks_of
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.inspection import Wanted, check
from loraplex_services.registry.publish.metrics import WATCHERS, refusals_counted
from loraplex_services.registry.publish.tags import MAX_SIDES, TagAddress, parse_expect
from loraplex_services.registry.publish.uploads import UploadSession, fingerprint

SERVICE_NAME = "loraplex.v1.RegistryService"


class RegistryService(AdminService):
    """Each method checks rights, converts, and calls one part."""

    async def CreateUpload(
        self, request: pb.CreateUploadRequest, context: Any
    ) -> pb.CreateUploadResponse:
        access = caller_access()
        with refusals_counted():
            async with self._openings.held(access.tenant, "uploads to begin"):
                session = await self._open_upload(request, access)
        return pb.CreateUploadResponse(
            upload_id=session.upload_id, progress=await self._progress(session)
        )

    async def _open_upload(self, request: pb.CreateUploadRequest, access: Access) -> UploadSession:
        options = convert.options_from_proto(request.options, access.tenant)
        access.require_publishing(options.tenant)
        files = files_from_proto(request.files)
        findings = Findings()
        check_files(files, findings)
        findings.raise_if_refused()
        registry = self._registry
        await registry.bases.check_upload(options.tenant, options.name, options.base_id)
        if options.parent:
            await registry.lookup.resolve(parse_ref(options.parent, options.tenant), access)
        offered = convert.offered_from_proto(request.options.signatures)
        limits = await registry.tenants.get(options.tenant)
        registry.rules.check_upload(limits, moves_tags=bool(options.tags))
        signed = await registry.signatures.accepted(limits, files, offered, access.actor)
        options = dataclasses.replace(options, signatures=signed)
        num_bytes = sum(file.size for file in files)
        upload = fingerprint(options, files, access.actor)
        await registry.tenants.begin_upload(limits, upload, num_bytes)
        known = await registry.catalog.known_blobs(options.tenant, [f.sha256 for f in files])
        return await registry.uploads.open(options, files, access.actor, known)

    async def UploadPart(
        self, request_iterator: AsyncIterator[pb.UploadPartRequest], context: Any
    ) -> pb.UploadPartResponse:
        async with self._upload_streams.held(caller_access().tenant, "uploads"):
            parts = self._paced(_not_idle(request_iterator))
            first = await anext(parts, None)
            if first is None:
                raise InvalidRequest.field(
                    "upload_id", "", "the first message must name the upload"
                )
            session = await self._session(first.upload_id)
            chunks = _chunks(first, parts)
            state = await self._registry.uploads.receive(session, first.path, first.offset, chunks)
        return pb.UploadPartResponse(progress=convert.progress_to_proto(state))

    async def GetUpload(self, request: pb.GetUploadRequest, context: Any) -> pb.GetUploadResponse:
        session = await self._session(request.upload_id)
        response = pb.GetUploadResponse(upload_id=session.upload_id)
        finished = await self._registry.uploads.finished(session.upload_id)
        if finished is None:
            response.progress.extend(await self._progress(session))
        else:
            response.finished.CopyFrom(convert.version_to_proto(finished.version, finished.adapter))
            for file in session.files:
                response.progress.add(path=file.path, committed_bytes=file.size, complete=True)
        return response

    async def FinishUpload(
        self, request: pb.FinishUploadRequest, context: Any
    ) -> pb.FinishUploadResponse:
        session = await self._session(request.upload_id)
        options, signatures = session.options, self._registry.signatures
        with refusals_counted():
            limits = await self._registry.tenants.get(options.tenant)
            self._registry.rules.check_upload(limits, moves_tags=bool(options.tags))
            signatures.check_upload(limits, options.signatures)
            done = await self._registry.publisher.finish(session)
        await signatures.keep(done.version, options.signatures)
        self._registry.retention.published(done.version)
        address = (done.version.tenant, done.version.name)
        tags = await self._registry.lookup.tags(*address)
        return pb.FinishUploadResponse(
            version=convert.version_to_proto(done.version, done.adapter, tags),
            created=done.created,
            warnings=[violation_to_proto(warning) for warning in done.version.warnings],
        )

    async def ValidateAdapter(
        self, request: pb.ValidateAdapterRequest, context: Any
    ) -> pb.ValidateAdapterResponse:
        caller_access().require("reader")
        files = files_from_proto(request.files)
        findings = Findings()
        check_files(files, findings)
        findings.raise_if_refused()
        if request.options.name:
            access = caller_access()
            tenant, _ = parse_name(request.options.name, access.tenant, field="options.name")
            offered = convert.offered_from_proto(request.options.signatures)
            limits = await self._registry.tenants.get(tenant)
            await self._registry.signatures.accepted(limits, files, offered, access.actor)
            moves_tags = bool(request.options.tags) or not request.options.no_latest
            self._registry.rules.check_upload(limits, moves_tags=moves_tags)
        labels = request.options.labels
        convert.check_labels(labels, "options.labels")
        wanted = Wanted(
            caller_access().tenant,
            request.options.base_id,
            request.options.strict,
            labels.get(ROPE_FIELD, ""),
            allow_missing=request.options.allow_missing,
        )
        base, report, _, warnings = await check(
            self._registry.bases,
            self._registry.validations,
            complete_config(request.adapter_config_json, rope_label=wanted.rope_label),
            request.safetensors_header,
            files,
            wanted,
        )
        return pb.ValidateAdapterResponse(
            warnings=[violation_to_proto(warning) for warning in warnings],
            base_id=base.base_id,
            max_rank=report.max_rank,
        )

    async def GetAdapter(
        self, request: pb.GetAdapterRequest, context: Any
    ) -> pb.GetAdapterResponse:
        access = caller_access()
        access.require("reader")
        ref = parse_ref(request.ref, access.tenant)
        found = await self._registry.lookup.resolve(ref, access, request.split_key)
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
        return pb.ListAdaptersResponse(
            versions=[convert.resolved_to_proto(entry) for entry in page],
            next_page_token=convert.page_token(cursor),
        )

    async def SetTag(self, request: pb.SetTagRequest, context: Any) -> pb.SetTagResponse:
        access = caller_access()
        tenant, name = parse_name(request.name, access.tenant)
        access.require("publisher", tenant)
        address = TagAddress(tenant, name, check_tag(request.tag))
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
        found = await self._registry.lookup.everything(tenant, name)
        if record is None or not access.may_see(tenant, found.adapter):
            raise NotFound(f"no tag {address}")
        return pb.ListTagHistoryResponse(
            moves=[convert.move_to_proto(move) for move in reversed(record.moves)]
        )

    async def DeleteAdapterVersion(
        self, request: pb.DeleteAdapterVersionRequest, context: Any
    ) -> pb.DeleteAdapterVersionResponse:
        access = caller_access()
        deletion = self._registry.deletion
        if request.all:
            tenant, name = parse_name(request.ref, access.tenant, field="ref")
            access.require("publisher", tenant)
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
                number = (await self._registry.lookup.resolve(ref, access)).version.version
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
        with WATCHERS.track_inprogress():
            async for batch in visible_batches(
                self._registry.catalog, access, request.resume_token
            ):
                yield pb.WatchAdaptersResponse(
                    events=[convert.event_to_proto(event) for event in batch.events],
                    resume_token=batch.token,
                    snapshot_begin=batch.begins_snapshot,
                    snapshot_end=batch.ends_snapshot,
                )

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

    async def _paced(
        self, parts: AsyncIterator[pb.UploadPartRequest]
    ) -> AsyncIterator[pb.UploadPartRequest]:
        """Pass on messages at the pace of all uploads."""
        async for part in parts:
            await self._upload_pace.wait(current_caller.get(), part.ByteSize())
            yield part

    async def _session(self, upload_id: str) -> UploadSession:
        """An upload of the caller's tenant."""
        access = caller_access()
        session = await self._registry.uploads.get(upload_id)
        access.require("publisher", session.options.tenant)
        return session

    async def _progress(self, session: UploadSession) -> list[pb.FileProgress]:
        states = await self._registry.uploads.state(session)
        missing = [state.file for state in states if not state.complete]
        known = await self._registry.blobs.known_files(session, missing)
        progress = [convert.progress_to_proto(state) for state in states]
        for state, message in zip(states, progress, strict=True):
            if state.file in known:
                message.committed_bytes, message.complete = state.file.size, True
        return progress

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
            if not number:
                ref = parse_ref(f"{address.scope}@{message.digest}", field="targets.digest")
                number = (await self._registry.lookup.resolve(ref, access)).version.version
            targets.append(TagTarget(number, message.digest, message.weight or 1))
        if len({target.version for target in targets}) < len(targets):
            raise InvalidRequest.field("targets", address.tag, "must not name a version twice")
        return targets


async def _not_idle(
    parts: AsyncIterator[pb.UploadPartRequest],
) -> AsyncGenerator[pb.UploadPartRequest]:
    """Pass messages on. Raises: DeadlineExceeded when the next one takes too long."""
    while True:
        try:
            async with asyncio.timeout(MAX_UPLOAD_IDLE_S):
                part = await anext(parts, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no data came for {MAX_UPLOAD_IDLE_S} s; what arrived is kept, continue from there"
            ) from None
        if part is None:
            return
        yield part


async def _chunks(
    first: pb.UploadPartRequest, rest: AsyncIterator[pb.UploadPartRequest]
) -> AsyncIterator[tuple[bytes, int]]:
    data = first.data
    yield data, first.crc32
    offset = first.offset + len(data)
    async for part in rest:
        if part.offset != offset:
            description = f"chunks must be contiguous: the next offset is {offset}"
            raise InvalidRequest.field("offset", part.offset, description)
        data = part.data  # Each look at it is a copy.
        offset += len(data)
        yield data, part.crc32


def service(registry: Registry) -> grpc_server.Service:
    """What `grpc_server.start` serves."""
    add = registry_pb2_grpc.add_RegistryServiceServicer_to_server
    return add, RegistryService(registry), SERVICE_NAME
