"""Server-sent events: a streaming response whose errors and end are those that OpenAI clients
expect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from loraplex.errors import LoraplexError
from loraplex_services.gateway.metrics import REQUESTS

logger = logging.getLogger(__name__)

COMMENT_INTERVAL_S = 10.0
_COMMENT = b": waiting\n\n"

Renamed = Callable[[LoraplexError], LoraplexError]
T = TypeVar("T")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def compact_json(value: object) -> str:
    """Compact JSON. Raises LoraplexError if a number is not finite, because JSON has no NaN."""
    try:
        return _encode(value)
    except ValueError:
        raise _not_finite() from None


def _not_finite() -> LoraplexError:
    return LoraplexError(
        "the answer has a number that is not finite: the adapter's weights are too large",
        reason="NOT_FINITE",
    )


_ITEMS_AT_ONCE = 64
_encode_part = msgspec.json.Encoder().encode


def json_in_parts(value: object, depth: int = 4) -> bytes:
    """JSON of a large answer, encoded in parts: other threads wait for the encoder, but run between
    two parts. The encoder is ten times as fast as `compact_json`, which refuses NaN.

    Args:
        value: of finite numbers, and arrays in what is taken apart.
        depth: how far down objects and lists are taken apart.

    Raises: LoraplexError if an array has a number that is not finite.
    """
    if isinstance(value, array):
        if not math.isfinite(sum(value)):
            raise _not_finite()
        value = value.tolist()
    if isinstance(value, dict) and depth:
        fields = (_encode_part(k) + b":" + json_in_parts(v, depth - 1) for k, v in value.items())
        return b"{%b}" % b",".join(fields)
    if isinstance(value, list | tuple) and depth and len(value) <= _ITEMS_AT_ONCE:
        return b"[%b]" % b",".join([json_in_parts(item, depth - 1) for item in value])
    if isinstance(value, list | tuple):
        starts = range(0, len(value), _ITEMS_AT_ONCE)
        parts = (_encode_part(value[at : at + _ITEMS_AT_ONCE])[1:-1] for at in starts)
        return b"[%b]" % b",".join(parts)
    return _encode_part(value)


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How the objects of a stream become events."""

    is_named: bool = False
    """Each event has the name that its object holds in `type`."""
    last: bytes = b""
    """The text after the last object."""

    def event(self, chunk: Mapping[str, Any]) -> bytes:
        """One object as an event."""
        content = compact_json(chunk)
        name = f"event: {chunk['type']}\n" if self.is_named else ""
        return f"{name}data: {content}\n\n".encode()


CHUNKS = StreamFormat(last=b"data: [DONE]\n\n")
"""Format of completions and chat."""


class EventStream:
    """An ASGI response that sends chunks as events.

    The status line is sent with the first chunk or comment, so that an error before that is raised
    and has its own status. A later error is sent as one event, after which the stream ends.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Mapping[str, Any]],
        headers: dict[str, str],
        stream_format: StreamFormat,
        renamed: Renamed,
        failure: Callable[[LoraplexError], Mapping[str, Any]],
    ) -> None:
        """`failure` is the last object of a stream that fails after it has begun."""
        self._chunks = chunks
        self._headers = headers
        self._format = stream_format
        self._renamed = renamed
        self._failure = failure
        self._has_begun = False
        self._sent_s = time.monotonic()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; ends early if the client disconnects."""
        comments = asyncio.create_task(self._comment(send))
        try:
            await until_gone(receive, self._stream(send))
        except ClientDisconnect:
            logger.debug("client disconnected")
        finally:
            comments.cancel()

    async def _stream(self, send: Send) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._send(send, self._format.event(chunk))
            await self._send(send, self._format.last, more=False)
        except LoraplexError as error:
            await self._fail(send, self._renamed(error))
        except Exception:
            logger.exception("stream failed")
            await self._fail(
                send, LoraplexError("internal error: the gateway's log has the traceback")
            )

    async def _fail(self, send: Send, error: LoraplexError) -> None:
        if not self._has_begun:
            raise error
        REQUESTS.labels("http", error.reason.lower()).inc()
        await self._send(send, self._format.event(self._failure(error)), more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if not self._has_begun:
                self._has_begun = True
                await send(_start(200, self._headers | _EVENT_HEADERS))
            await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent_s = time.monotonic()

    async def _comment(self, send: Send) -> None:
        """Send a comment after a period of silence, so that proxies keep the connection."""
        while True:
            wait_s = self._sent_s + COMMENT_INTERVAL_S - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._send(send, _COMMENT)


_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it if the client disconnects. Raises: ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
