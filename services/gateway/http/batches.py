"""/v1/batches: files of requests that run when there is free capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import LIST_CALLS
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import Files
from loraplex_services.gateway.batches.layout import id_of_document
from loraplex_services.gateway.http.answering import json_response
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.guard import check_origin
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.pages import check_parameters, limit_of, page_of
from loraplex_services.gateway.http.stored_objects import batch_object, parse_batch

_MAX_LIMIT = 100


@dataclass(frozen=True, slots=True, eq=False)
class BatchEndpoints:
    """Endpoints over the batch jobs of the object store."""

    context: AppContext
    files: Files
    book: BatchBook
    wake: Callable[[str, str], None]
    """Says, by tenant and id, that a batch job was created or cancelled."""

    def routes(self) -> list[Route]:
        one = "/v1/batches/{batch_id}"
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route(one, self.read, methods=["GET"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/batches: run the requests of a file."""
        caller = await self.context.reader(request, LIST_CALLS)
        record = parse_batch(await read_json(request, caller), caller)
        file = await self.files.get(caller.tenant, record.input_file_id, "input_file_id")
        if file.purpose != "batch":
            why = f"has the purpose {file.purpose}; upload a file for batch jobs"
            raise InvalidRequest.field("input_file_id", file.file_id, why)
        stored = await self.files.stored(caller.tenant)
        stored.check_quota()
        keys = await self.book.documents(caller.tenant)
        await self.context.looked_at(caller, stored.num_files + len(keys))
        await self.book.create(record, keys)
        self.wake(record.tenant, record.batch_id)
        return json_response(batch_object(record))

    async def list(self, request: Request) -> Response:
        """GET /v1/batches: newest first."""
        caller = await self.context.reader(request, LIST_CALLS)
        query = request.query_params
        check_parameters(query, ("after", "limit"))
        limit = limit_of(query, 20, _MAX_LIMIT)
        keys = await self.book.documents(caller.tenant)
        await self.context.looked_at(caller, len(keys))
        if after := query.get("after"):
            keys = [key for key in keys if id_of_document(key) < after]
        return json_response(await page_of(self.book.listed(keys[::-1]), batch_object, limit))

    async def read(self, request: Request) -> Response:
        """GET /v1/batches/{id}."""
        tenant = (await self.context.reader(request, 1)).tenant
        return json_response(
            batch_object(await self.book.get(tenant, request.path_params["batch_id"]))
        )

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel: results so far are kept."""
        tenant = (await self.context.reader(request, 1)).tenant
        check_origin(request)
        record = await self.book.cancel(tenant, request.path_params["batch_id"])
        self.wake(tenant, record.batch_id)
        return json_response(batch_object(record))
