"""The methods of RegistryService that publish."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from loraplex.adapter_format import File
from loraplex.adapter_format.files import check_files
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.serving_fields import ROPE_FIELD, complete_config
from loraplex.api.format_wire import files_from_proto
from loraplex.api.wire import violations_to_proto
from loraplex.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    InvalidAdapter,
    InvalidRequest,
    NotFound,
)
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.callers import current_caller
from loraplex_services.common.limits import (
    MAX_OPENINGS,
    MAX_OPENINGS_PER_TENANT,
    MAX_UPLOAD_IDLE_S,
    MAX_UPLOAD_STREAMS,
    MAX_UPLOAD_STREAMS_PER_TENANT,
)
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api import convert, publish_options
from loraplex_services.registry.api.admin import AdminService, caller_access
from loraplex_services.registry.api.one_call import check_request_id, contents_of
from loraplex_services.registry.api.upload_pace import UploadPace
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.inspection import Requirements
from loraplex_services.registry.publish.metrics import refusals_counted
from loraplex_services.registry.publish.uploads import (
    Finished,
    Options,
    UploadSession,
    fingerprint,
    no_upload,
)
from loraplex_services.registry.records import BaseRecord, TenantRecord

MAX_FILES = 64
"""Most files that an upload declares. An adapter may have fewer, and each other one is named."""

Part = TypeVar("Part", pb.UploadPartRequest, pb.PublishAdapterRequest)


@dataclass(frozen=True, slots=True)
class _CheckedUpload:
    """A publication that passed the checks before its bytes, and what was read for them."""

    options: Options
    files: tuple[File, ...]
    limits: TenantRecord
    bases: Sequence[BaseRecord]


class PublishService(AdminService):
    """Uploads and validation."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._openings = TenantSlots(MAX_OPENINGS, max_held=MAX_OPENINGS_PER_TENANT)
        self._upload_pace = UploadPace()
        self._upload_streams = TenantSlots(
            MAX_UPLOAD_STREAMS, max_held=MAX_UPLOAD_STREAMS_PER_TENANT
        )

    async def CreateUpload(
        self, request: pb.CreateUploadRequest, context: Any
    ) -> pb.CreateUploadResponse:
        access = caller_access()
        with refusals_counted():
            async with self._openings.held(access.tenant, "uploads to begin"):
                session = await self._open_upload(request, access)
        progress = await self._progress(session)
        return pb.CreateUploadResponse(upload_id=session.upload_id, progress=progress)

    async def _open_upload(self, request: pb.CreateUploadRequest, access: Access) -> UploadSession:
        checked = await self._checked(request.options, request.files, access)
        options, files, registry = checked.options, checked.files, self._registry
        num_bytes = sum(file.size for file in files)
        upload = fingerprint(options, files, access.actor)
        known = await registry.catalog.known_blobs(options.tenant, [f.sha256 for f in files])
        may_exist = len(known) == len(files)
        await registry.tenants.begin_upload(checked.limits, upload, num_bytes, may_exist=may_exist)
        return await registry.uploads.open(options, files, access.actor, known)

    async def _checked(
        self, message: pb.PublishOptions, specs: Sequence[pb.FileSpec], access: Access
    ) -> _CheckedUpload:
        """Refuse what can be refused before the bytes arrive. Raises as the checks do."""
        options = publish_options.options_from_proto(message, access.tenant)
        access.require_publishing(options.tenant)
        files = _checked_files(specs)
        registry = self._registry
        bases, limits = await asyncio.gather(
            registry.bases.check_upload(options.tenant, options.name, options.base_id),
            registry.tenants.get(options.tenant),
        )
        if options.parent:
            try:
                await registry.lookup.resolve(parse_ref(options.parent, options.tenant), access)
            except AdapterNotFound as error:
                why, value = str(error), options.parent
                raise NotFound.field("options.parent", value, why, reason=error.reason) from None
        offered = publish_options.offered_from_proto(message.signatures)
        registry.rules.check_upload(limits, moves_tags=bool(options.tags))
        signed = await registry.signatures.accepted(limits, files, offered, access.actor)
        return _CheckedUpload(dataclasses.replace(options, signatures=signed), files, limits, bases)

    async def UploadPart(
        self, request_iterator: AsyncIterator[pb.UploadPartRequest], context: Any
    ) -> pb.UploadPartResponse:
        async with self._upload_streams.held(caller_access().tenant, "uploads"):
            parts = self._paced(_not_idle(request_iterator))
            opening = await anext(parts, None)
            if opening is None:
                raise InvalidRequest.field(
                    "upload_id", "", "the first message must name the upload"
                )
            first = opening[0]
            session = await self._session(first.upload_id)
            chunks = _chunks(opening, parts)
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
        return pb.FinishUploadResponse(
            version=await self._published(done, options),
            created=done.created,
            warnings=violations_to_proto(done.version.warnings),
        )

    async def PublishAdapter(
        self, request_iterator: AsyncIterator[pb.PublishAdapterRequest], context: Any
    ) -> pb.PublishAdapterResponse:
        access = caller_access()
        async with self._upload_streams.held(access.tenant, "uploads"):
            parts = self._paced(_not_idle(request_iterator))
            opening = await anext(parts, None)
            if opening is None:
                description = "the first message must have the options"
                raise InvalidRequest.field("options", "", description)
            first, data = opening
            with refusals_counted():
                checked = await self._checked(first.options, first.files, access)
                has_room = await self._has_room(checked, access)
                session = self._registry.uploads.in_one_call(
                    checked.options, checked.files, access.actor, check_request_id(first.request_id)
                )
                session = dataclasses.replace(session, has_room=has_room)
                rest = (data async for _, data in parts)
                contents = await contents_of(data, rest, checked.files)
                done = await self._registry.publisher.publish(session, contents, checked.bases)
        return pb.PublishAdapterResponse(
            version=await self._published(done, checked.options),
            created=done.created,
            warnings=violations_to_proto(done.version.warnings),
        )

    async def _has_room(self, checked: _CheckedUpload, access: Access) -> bool:
        """True if the quota has room for an upload next to other unfinished ones. False if it may
        be a version that exists, which needs none. Raises ResourceExhausted otherwise."""
        limits, files, catalog = checked.limits, checked.files, self._registry.catalog
        if not (limits.max_bytes or limits.max_versions):
            return True
        known = await catalog.known_blobs(limits.tenant, [file.sha256 for file in files])
        if len(known) == len(files):
            return False
        num_bytes, others = sum(file.size for file in files), 0
        if limits.max_bytes:
            upload = fingerprint(checked.options, files, access.actor)
            others = await catalog.open_uploads.num_bytes(limits.tenant, but=upload)
        await self._registry.tenants.check_quota(limits, num_bytes, others)
        return True

    async def _published(self, done: Finished, options: Options) -> pb.AdapterVersion:
        """Do what follows a publication; returns the version."""
        await self._registry.signatures.keep(done.version, options.signatures)
        self._registry.retention.published(done.version)
        tags = await self._registry.lookup.tags(done.version.tenant, done.version.name)
        return convert.version_to_proto(done.version, done.adapter, tags)

    async def ValidateAdapter(
        self, request: pb.ValidateAdapterRequest, context: Any
    ) -> pb.ValidateAdapterResponse:
        access = caller_access()
        access.require("reader")
        if not request.options.name:
            return await self._validated(request, access, _checked_files(request.files))
        with refusals_counted():
            checked = await self._checked(request.options, request.files, access)
            await self._has_room(checked, access)
            return await self._validated(request, access, checked.files)

    async def _validated(
        self, request: pb.ValidateAdapterRequest, access: Access, files: Sequence[File]
    ) -> pb.ValidateAdapterResponse:
        labels = request.options.labels
        publish_options.check_labels(labels, "options.labels")
        wanted = Requirements(
            access.tenant,
            request.options.base_id,
            request.options.strict,
            labels.get(ROPE_FIELD, ""),
            allow_missing=request.options.allow_missing,
        )
        base, report, _, warnings = await self._registry.inspector.check(
            complete_config(request.adapter_config_json, rope_label=wanted.rope_label),
            request.safetensors_header,
            files,
            wanted,
        )
        return pb.ValidateAdapterResponse(
            warnings=violations_to_proto(warnings),
            base_id=base.base_id,
            max_rank=report.max_rank,
        )

    async def _paced(self, parts: AsyncIterator[Part]) -> AsyncIterator[tuple[Part, bytes]]:
        """Pass on each message without its data, and its data, at the pace of all uploads.

        The data is taken out once, because reading `part.data` copies it, and `ByteSize` copies the
        message twice. The other fields count as well: a message may be large without data.
        """
        async for part in parts:
            data = part.data
            part.ClearField("data")
            num_bytes = len(data) + part.ByteSize()
            await self._upload_pace.wait(current_caller.get(), num_bytes)
            yield part, data

    async def _session(self, upload_id: str) -> UploadSession:
        """An upload of the caller's tenant.

        Raises:
            NotFound: there is none with this id, or another tenant has it, which is not told.
        """
        access = caller_access()
        session = await self._registry.uploads.get(upload_id)
        if not access.owns(session.options.tenant):
            raise no_upload(upload_id)
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


def _checked_files(specs: Sequence[pb.FileSpec]) -> tuple[File, ...]:
    """The declared files. Raises InvalidAdapter for names and sizes that an adapter cannot have."""
    if len(specs) > MAX_FILES:
        why = f"an adapter has at most {MAX_FILES} files"
        raise InvalidAdapter.field("files", f"{len(specs)} files", why)
    files, findings = files_from_proto(specs), Findings()
    check_files(files, findings)
    findings.raise_if_refused()
    return files


async def _not_idle(parts: AsyncIterator[Part]) -> AsyncGenerator[Part]:
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
    first: tuple[pb.UploadPartRequest, bytes],
    rest: AsyncIterator[tuple[pb.UploadPartRequest, bytes]],
) -> AsyncIterator[tuple[bytes, int]]:
    part, data = first
    yield data, part.crc32
    offset = part.offset + len(data)
    async for part, data in rest:
        if part.offset != offset:
            description = f"chunks must be contiguous: the next offset is {offset}"
            raise InvalidRequest.field("offset", part.offset, description)
        offset += len(data)
        yield data, part.crc32
