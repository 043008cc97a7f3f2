"""/v1/files: inputs and results of batches, in the object store."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from loraplex.errors import Conflict, InvalidRequest, Unsupported
from loraplex_services.common.limits import (
    LIST_CALLS,
    MAX_FILE_UPLOADS,
    MAX_FILE_UPLOADS_PER_TENANT,
)
from loraplex_services.common.objects import ObjectStoreError
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import FileRecord, Files, capped, new_file_id
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.multipart import Form, read_form
from loraplex_services.gateway.http.pages import (
    check_parameters,
    choice_of,
    limit_of,
    page_body,
)
from loraplex_services.gateway.metrics import FILE_BYTES

_PURPOSE = "batch"
_MAX_LIMIT = 10_000
_INDEXED = re.compile(r"expires_after\[(\w+)\]")


class FileEndpoints:
    """Endpoints over the files of the object store."""

    def __init__(self, context: AppContext, files: Files, book: BatchBook) -> None:
        self._context = context
        self._files = files
        self._book = book
        self._uploads = TenantSlots(MAX_FILE_UPLOADS, max_held=MAX_FILE_UPLOADS_PER_TENANT)

    def routes(self) -> list[Route]:
        """All paths."""
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
        tenant = (await self._context.caller(request)).tenant
        file_id = new_file_id()
        async with self._uploads.held(tenant, "uploads of files"):
            quota_bytes = await self._files.check_quota(tenant)

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
        tenant = (await self._context.reader(request, LIST_CALLS)).tenant
        query = request.query_params
        check_parameters(query, ("after", "limit", "order", "purpose"))
        limit = limit_of(query, _MAX_LIMIT, _MAX_LIMIT)
        listed = self._files.listed(
            tenant,
            after=query.get("after", ""),
            newest_first=choice_of(query, "order", ("desc", "asc")) == "desc",
            purpose=query.get("purpose", ""),
        )
        entries: list[dict[str, Any]] = []
        has_more = False
        async with aclosing(listed):
            async for record in listed:
                if has_more := len(entries) == limit:
                    break
                entries.append(file_object(record))
        return json_response(page_body(entries, has_more=has_more))

    async def read(self, request: Request) -> Response:
        """GET /v1/files/{id}."""
        return json_response(file_object(await self._found(request)))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content: the bytes."""
        record = await self._found(request)

        async def counted() -> AsyncGenerator[bytes]:
            async with aclosing(self._files.read(record)) as chunks:
                async for chunk in chunks:
                    FILE_BYTES.labels("out").inc(len(chunk))
                    yield chunk

        headers = {
            "content-length": str(record.num_bytes),
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(counted(), media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{id}: refused while a batch reads it."""
        record = await self._found(request)
        if batch_id := await self._book.input_of(record.tenant, record.file_id):
            why = f"{batch_id} reads this file; cancel it first, or wait until it has ended"
            raise Conflict(why)
        await self._files.delete(record.tenant, record.file_id)
        return json_response({"id": record.file_id, "object": "file", "deleted": True})

    async def _found(self, request: Request) -> FileRecord:
        caller = await self._context.reader(request, 1)
        return await self._files.get(caller.tenant, request.path_params["file_id"])


def _record(form: Form, tenant: str, file_id: str) -> FileRecord:
    """Raises: InvalidRequest, Unsupported."""
    fields: dict[str, Any] = {}
    for name, text in form.fields.items():
        if match := _INDEXED.fullmatch(name):
            fields.setdefault("expires_after", {})[match[1]] = (
                int(text) if text.isascii() and text.isdecimal() else text
            )
        else:
            fields[name] = text
    body = Body(fields)
    purpose = body.text("purpose") or ""
    lifetime_s = body.lifetime("expires_after")
    body.finish()
    if purpose != _PURPOSE:
        raise Unsupported.field("purpose", purpose, "only files for batches are served: batch")
    if not form.num_file_bytes:
        raise InvalidRequest.field("file", "", "is empty")
    created_s = int(time.time())
    return FileRecord(
        file_id=file_id,
        tenant=tenant,
        filename=form.filename,
        purpose=purpose,
        num_bytes=form.num_file_bytes,
        created_s=created_s,
        expires_s=created_s + lifetime_s,
    )


def file_object(record: FileRecord) -> dict[str, Any]:
    """A file as OpenAI shows it."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s or None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
