"""The endpoints of /v1/responses: create, count, read, continue and delete."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import InvalidRequest
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import HTTP_BODY
from loraplex_services.gateway.http.answering import Responder, json_response
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.body import bad_type
from loraplex_services.gateway.http.calls import origin_of
from loraplex_services.gateway.http.json_body import LargeBodies, read_json
from loraplex_services.gateway.http.pages import (
    check_parameters,
    is_newest_first,
    limit_of,
    page_body,
)
from loraplex_services.gateway.http.responses.formatter import ResponsesFormatter
from loraplex_services.gateway.http.responses.items import REFERENCE, kind_of
from loraplex_services.gateway.http.responses.parse import (
    History,
    ResponsesCall,
    parse_responses,
)
from loraplex_services.gateway.http.responses.store import ResponseStore, StoredResponse
from loraplex_services.gateway.http.sse import StreamFormat, compact_json
from loraplex_services.gateway.http.tokenize import PromptEncoder

_EVENTS = StreamFormat(is_named=True)
_STEM_CHARS = 32
"""Characters of an id that response and items share, after the prefix."""


class ResponsesEndpoints:
    """Endpoints over the one path of generated text, and a store of what it made."""

    def __init__(
        self,
        context: AppContext,
        responder: Responder,
        encoder: PromptEncoder,
    ) -> None:
        self._context = context
        self._responder = responder
        self._encoder = encoder
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count, methods=["POST"]),
            Route(one, self.read, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Any:
        """POST /v1/responses."""
        caller = await self._context.caller(request)
        call = await self._parsed(request, caller)
        loop = asyncio.get_running_loop()

        def keep(response: dict[str, Any]) -> None:
            """Keep the response; called from another thread if it is long."""
            loop.call_soon_threadsafe(self._keep, caller.tenant, call, response)

        return await self._responder.answer(
            request,
            call.chat,
            f"resp_{secrets.token_hex(_STEM_CHARS // 2)}",
            lambda info: ResponsesFormatter(info, call, keep),
            _EVENTS,
        )

    async def count(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: the tokens of the same body's prompt."""
        caller = await self._context.text_reader(request)
        [call] = (await self._parsed(request, caller)).chat.calls
        _, ids = await self._encoder.encode(call.model, caller, call.prompt, "input")
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def read(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""
        caller, stored = await self._stored(request, ("include",))
        await self._wait(request, caller, len(stored.response))
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        caller, stored = await self._stored(request)
        self._store.delete(caller.tenant, stored.response_id)
        return json_response({"id": stored.response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: refused, because none runs in the background."""
        _, stored = await self._stored(request)
        why = "is finished; to cancel one that runs, close its connection"
        raise InvalidRequest.field("response_id", stored.response_id, why)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: what this request sent, newest first by default."""
        caller, stored = await self._stored(request, ("after", "include", "limit", "order"))
        await self._wait(request, caller, len(stored.items))
        query = request.query_params
        items = json.loads(stored.items)
        if is_newest_first(query):
            items.reverse()
        ids = [item["id"] for item in items]
        if after := query.get("after"):
            if after not in ids:
                raise InvalidRequest.field("after", after, "no such item in this response")
            items = items[ids.index(after) + 1 :]
        page = items[: limit_of(query, 20, 100)]
        return json_response(page_body(page, has_more=len(page) < len(items)))

    async def _parsed(self, request: Request, caller: Caller) -> ResponsesCall:
        fields = await read_json(request, caller)
        origin = origin_of(request, caller)
        return parse_responses(fields, origin, await self._history(request, caller, fields))

    async def _history(self, request: Request, caller: Caller, fields: dict[str, Any]) -> History:
        """The response that a request continues, and the items that it refers to."""
        previous_id = fields.get("previous_response_id")
        if previous_id is not None and (not isinstance(previous_id, str) or not previous_id):
            raise bad_type("previous_response_id", previous_id, "the id of a response")
        turns = self._store.history(caller.tenant, previous_id) if previous_id else []
        referred = self._referred(caller.tenant, fields.get("input"))
        if not turns and not referred:
            return History()
        pairs = b",".join(b"[%b,%b]" % (each.items, each.response) for each in turns)
        responses = b",".join(each.response for each in referred)
        bodies: LargeBodies = request.state.large_bodies
        raw = b'{"turns":[%b],"referred":[%b]}' % (pairs, responses)
        parsed = await bodies.parse(raw, caller)
        items = [
            item for given, response in parsed["turns"] for item in (*given, *response["output"])
        ]
        kept = {item["id"]: item for each in parsed["referred"] for item in each["output"]}
        return History(items, kept)

    def _referred(self, tenant: str, items: Any) -> list[StoredResponse]:
        """The responses whose items are referred to: their ids have a part in common.

        Raises: InvalidRequest if they are too long for a body.
        """
        given = items if isinstance(items, list) else []
        references = [i for i in given if isinstance(i, dict) and kind_of(i) == REFERENCE]
        ids = [reference.get("id") for reference in references]
        stems = {i.partition("_")[2][:_STEM_CHARS] for i in ids if isinstance(i, str)}
        found = [self._store.find(tenant, f"resp_{stem}") for stem in stems]
        kept = [stored for stored in found if stored is not None]
        if sum(each.num_bytes for each in kept) > HTTP_BODY.max_message_bytes:
            raise InvalidRequest.field("input", "", "refers to too many bytes; send the items")
        return kept

    def _keep(self, tenant: str, call: ResponsesCall, response: dict[str, Any]) -> None:
        if not call.stores:
            return
        stem = response["id"].partition("_")[2]
        items = [
            {"id": f"in_{stem}{index:04x}", **_spelled_out(item)}
            for index, item in enumerate(call.items)
        ]
        stored = StoredResponse(response["id"], call.previous_id, _raw(response), _raw(items))
        self._store.put(tenant, stored)

    async def _wait(self, request: Request, caller: Caller, num_bytes: int) -> None:
        """Wait as for a body of this size: a stored response may be as large."""
        bodies: LargeBodies = request.state.large_bodies
        await bodies.wait(caller, num_bytes)

    async def _stored(
        self, request: Request, parameters: Sequence[str] = ()
    ) -> tuple[Caller, StoredResponse]:
        """The caller, and the response of its tenant that the path names."""
        check_parameters(request.query_params, parameters)
        caller = await self._context.reader(request, 1)
        return caller, self._store.get(caller.tenant, request.path_params["response_id"])


def _spelled_out(item: Mapping[str, Any]) -> dict[str, Any]:
    """An input item in its long form: a message with its type and a list of parts."""
    if "role" not in item:
        return dict(item)
    content = item["content"]
    if isinstance(content, str):
        is_answer = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
        content = [part | {"text": content} | ({"annotations": []} if is_answer else {})]
    return {"type": "message", **item, "content": content}


def _raw(value: Any) -> bytes:
    return compact_json(value).encode()
