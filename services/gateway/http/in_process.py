"""Calls the gateway's own endpoints without a connection, for the lines of batch jobs.

A line thereby has the same checks, answers and errors as a request of its tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from loraplex.api.request import BACKGROUND_PRIORITY
from loraplex.errors import LoraplexError, ResourceExhausted, Unsupported, codes_of
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.batches.results import Answer
from loraplex_services.gateway.http.errors import error_body
from loraplex_services.gateway.http.json_body import LargeBodies, check_values

_TURN_S = 1.0


class InProcessEndpoints:
    """The endpoints of an app, for callers that were checked before."""

    def __init__(self, app: Callable[[], ASGIApp]) -> None:
        self._app = app
        self._bodies = LargeBodies()

    async def parse(self, raw: bytes, caller: Caller) -> dict[str, Any]:
        """The object of a line; large ones wait as HTTP bodies do. Raises: InvalidRequest."""
        check_values(raw.count(b","), raw.count(b"{") + raw.count(b"["))
        while True:
            try:
                return await self._bodies.parse(raw, caller)
            except ResourceExhausted:
                await asyncio.sleep(_TURN_S)

    async def post(
        self, caller: Caller, path: str, body: dict[str, Any], request_id: str
    ) -> Answer:
        """The answer of an endpoint to a request of the background priority."""
        if body.get("stream"):
            error = Unsupported.field("stream", True, "leave it out in batch jobs")
            return _refused(error, request_id)
        if path == "/v1/responses":
            # Thousands of responses would displace those that the tenant wants to continue.
            body = {"store": False, **body}
        sent = _Exchange()
        # An endpoint that crashes has logged it and answered. The app raises it all the same, for
        # its server; the batch job goes on, as another client would.
        with contextlib.suppress(Exception):
            await self._app()(_scope(caller, path, body, request_id), sent.receive, sent.send)
        return sent.answer(request_id)


class _Exchange:
    """The client's side of one call: the body is read already, and nobody leaves."""

    def __init__(self) -> None:
        self._status = 500
        self._headers = Headers()
        self._body = bytearray()
        self._is_body_sent = False

    async def receive(self) -> Message:
        if not self._is_body_sent:
            self._is_body_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = Headers(raw=list(message.get("headers", [])))
        else:
            self._body += message.get("body", b"")

    def answer(self, request_id: str) -> Answer:
        after = self._headers.get("retry-after", "")
        return Answer(
            self._status,
            bytes(self._body) or b"null",
            request_id,
            float(after) if after.isdecimal() else None,
        )


def _scope(caller: Caller, path: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id.encode()),
        ],
        "client": None,
        "server": None,
        # Only this module sets them: what comes over a connection has an empty state.
        "state": {"acts_for": caller, "fields": body, "priority": BACKGROUND_PRIORITY},
    }


def _refused(error: LoraplexError, request_id: str) -> Answer:
    return Answer(codes_of(error).http, error_body(error), request_id)
