"""/v1/files: inputs and results of batch jobs, in the object store."""

from __future__ import annotations

import contextlib
import operator
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from loraplex.errors import Conflict, InvalidRequest, Unsupported
from loraplex_services.common.limits import (
    LIST_CALLS,
    MAX_FILE_DOWNLOADS,
    MAX_FILE_DOWNLOADS_PER_TENANT,
    MAX_FILE_UPLOADS,
    MAX_FILE_UPLOADS_PER_TENANT,
)
from loraplex_services.common.objects import ObjectStoreError
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.common.units import parse_digits
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import FileRecord, Files, capped, new_file_id
from loraplex_services.gateway.batches.layout import id_of_document
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.guard import check_origin
from loraplex_services.gateway.http.multipart import Form, read_form
from loraplex_services.gateway.http.pages import (
    check_parameters,
    is_newest_first,
    limit_of,
    page_of,
)
from loraplex_services.gateway.http.stored_objects import DeletedFile, file_object
from loraplex_services.gateway.metrics import FILE_BYTES

_PURPOSE: Final = "batch"
_MAX_LIMIT = 10_000
_INDEXED = re.compile(r"expires_after\[(\w+)\]")


class FileEndpoints:
    """Endpoints over the files of the object store."""

    def __init__(self, context: AppContext, files: Files, book: BatchBook) -> None:
        self._context = context
        self._files = files
        self._book = book
        self._uploads = TenantSlots(MAX_FILE_UPLOADS, max_held=MAX_FILE_UPLOADS_PER_TENANT)
        self._downloads = TenantSlots(
            MAX_FILE_DOWNLOADS,
            max_held=MAX_FILE_DOWNLOADS_PER_TENANT,
            max_waiting_per_tenant=MAX_FILE_DOWNLOADS_PER_TENANT,
        )

    def routes(self) -> list[Route]:
        one = "/v1/files/{file_id}"
        return [
            Route("/v1/files", self.create, methods=["POST"]),
            Route("/v1/files", self.list, methods=["GET"]),
            Route(one, self.read, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/files: a form with the file and its purpose."""
        caller = await self._context.reader(request, LIST_CALLS)
        check_origin(request)
        tenant, file_id = caller.tenant, new_file_id()
        async with self._uploads.held(tenant, "uploads of files"):
            stored = await self._files.stored(tenant)
            quota_bytes = stored.check_quota()
            await self._context.looked_at(caller, stored.num_files)

            async def write(chunks: AsyncGenerator[bytes]) -> int:
                return await self._files.write(tenant, file_id, capped(chunks, quota_bytes))

            try:
                record = _record(await read_form(request, write), tenant, file_id)
                await self._files.add(record)
            except BaseException:
                with contextlib.suppress(ObjectStoreError):
                    await self._files.delete(tenant, file_id)
                raise
        FILE_BYTES.labels("in").inc(record.num_bytes)
        return json_response(file_object(record))

    async def list(self, request: Request) -> Response:
        """GET /v1/files: newest first by default."""
        caller = await self._context.reader(request, LIST_CALLS)
        query = request.query_params
        check_parameters(query, ("after", "limit", "order", "purpose"))
        limit = limit_of(query, _MAX_LIMIT, _MAX_LIMIT)
        newest_first = is_newest_first(query)
        keys = await self._files.documents(caller.tenant)
        await self._context.looked_at(caller, len(keys))
        if newest_first:
            keys.reverse()
        if after := query.get("after"):
            is_later = operator.lt if newest_first else operator.gt
            keys = [key for key in keys if is_later(id_of_document(key), after)]
        listed = self._files.listed(keys, query.get("purpose", ""))
        return json_response(await page_of(listed, file_object, limit))

    async def read(self, request: Request) -> Response:
        """GET /v1/files/{id}."""
        return json_response(file_object(await self._found(request)))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content: the bytes."""
        record = await self._found(request)
        return _Download(record, self._files, self._downloads)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{id}: refused while a batch job reads it."""
        record = await self._found(request)
        if batch_id := await self._book.input_of(record.tenant, record.file_id):
            why = f"{batch_id} reads this file; cancel it first, or wait until it has ended"
            raise Conflict(why)
        await self._files.delete(record.tenant, record.file_id)
        deleted: DeletedFile = {"id": record.file_id, "object": "file", "deleted": True}
        return json_response(deleted)

    async def _found(self, request: Request) -> FileRecord:
        caller = await self._context.reader(request, 1)
        return await self._files.get(caller.tenant, request.path_params["file_id"])


class _Download(StreamingResponse):
    """The bytes of a file, sent while its tenant may have one more download."""

    def __init__(self, record: FileRecord, files: Files, slots: TenantSlots) -> None:
        self._tenant = record.tenant
        self._slots = slots

        async def counted() -> AsyncGenerator[bytes]:
            async with aclosing(files.read(record)) as chunks:
                async for chunk in chunks:
                    FILE_BYTES.labels("out").inc(len(chunk))
                    yield chunk

        headers = {
            "content-length": str(record.num_bytes),
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        super().__init__(counted(), media_type="application/octet-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises: ResourceExhausted if too many downloads of the tenant wait."""
        async with self._slots.held(self._tenant, "downloads of files"):
            await super().__call__(scope, receive, send)


def _record(form: Form, tenant: str, file_id: str) -> FileRecord:
    """Raises: InvalidRequest, Unsupported."""
    fields: dict[str, Any] = {}
    for name, text in form.fields.items():
        if match := _INDEXED.fullmatch(name):
            number = parse_digits(text)
            fields.setdefault("expires_after", {})[match[1]] = text if number is None else number
        else:
            fields[name] = text
    body = Body(fields)
    purpose = body.text("purpose") or ""
    lifetime_s = body.lifetime("expires_after")
    body.finish()
    if purpose != _PURPOSE:
        raise Unsupported.field("purpose", purpose, "only files for batch jobs are served: batch")
    if not form.num_file_bytes:
        raise InvalidRequest.field("file", "", "is empty")
    created_s = int(time.time())
    return FileRecord(
        file_id=file_id,
        tenant=tenant,
        filename=form.filename,
        purpose=_PURPOSE,
        num_bytes=form.num_file_bytes,
        created_s=created_s,
        expires_s=created_s + lifetime_s,
    )
