"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex_services.gateway.http.answering import Responder, json_response
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.calls import origin_of
from loraplex_services.gateway.http.errors import MESSAGES_PATH
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.messages.formatter import MessagesFormatter
from loraplex_services.gateway.http.messages.parse import parse_messages
from loraplex_services.gateway.http.sse import StreamFormat
from loraplex_services.gateway.http.tokenize import PromptEncoder

_EVENTS = StreamFormat(is_named=True)


@dataclass(frozen=True, slots=True, eq=False)
class MessagesEndpoints:
    """Endpoints over the one path of generated text."""

    context: AppContext
    responder: Responder
    encoder: PromptEncoder

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES_PATH, self.create, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Any:
        """POST /v1/messages."""
        caller = await self.context.caller(request)
        fields = await read_json(request, caller)
        call = parse_messages(fields, origin_of(request, caller))
        answer_id = f"msg_{request.state.request_id}"
        return await self.responder.answer(request, call, answer_id, MessagesFormatter, _EVENTS)

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        caller = await self.context.text_reader(request)
        fields = await read_json(request, caller)
        origin = origin_of(request, caller)
        [call] = parse_messages(fields, origin, generates=False).calls
        _, ids = await self.encoder.encode(call.model, caller, call.prompt, "messages")
        return json_response({"input_tokens": len(ids)})
