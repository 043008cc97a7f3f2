"""Sends large answers in parts, as clients read them, and counts what they have not read.

uvicorn takes a body of any size at once and keeps what the client does not read. Nothing would
bound the number of such answers: a client could ask for many and read none of them.
"""

from __future__ import annotations

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from loraplex.errors import InvalidRequest, ResourceExhausted
from loraplex_services.common.callers import LOCAL
from loraplex_services.common.limits import MAX_SMALL_MESSAGE_BYTES
from loraplex_services.gateway.http.errors import refusal
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes

_PART_BYTES = 64 << 10


class AnswerParts:
    """What one request sends. Small answers and streams pass unchanged."""

    def __init__(self, scope: Scope, send: Send, collected: CollectedBytes) -> None:
        self._scope = scope
        self._send = send
        self._collected = collected
        self._start: Message | None = None
        """The start of an answer that may be large, until it is known whether it is refused."""

    async def __call__(self, message: Message) -> None:
        """Send a message, or refuse the answer if its tenant has too many that are not read."""
        if message["type"] == "http.response.start" and _is_large(message):
            self._start = message
            return
        start, self._start = self._start, None
        if start is None:
            await self._send(message)
        elif message.get("more_body"):  # a download, which holds only what it sends next
            await self._send(start)
            await self._send(message)
        else:
            await self._send_parts(start, message["body"])

    async def _send_parts(self, start: Message, body: bytes) -> None:
        caller = self._scope["state"].get("caller", LOCAL)
        with ExitStack() as held:
            try:
                held.enter_context(self._collected.unread(caller, len(body)))
            except (InvalidRequest, ResourceExhausted) as error:
                start, body = refusal(error, self._scope["path"])
            await self._send(start)
            view = memoryview(body)
            for begin in range(0, len(body), _PART_BYTES):
                # Each part is taken when the client has read most of those before.
                part = bytes(view[begin : begin + _PART_BYTES])
                has_more = begin + _PART_BYTES < len(body)
                await self._send(
                    {"type": "http.response.body", "body": part, "more_body": has_more}
                )


def _is_large(start: Message) -> bool:
    declared = Headers(raw=start["headers"]).get("content-length", "")
    return declared.isdecimal() and int(declared) > MAX_SMALL_MESSAGE_BYTES
