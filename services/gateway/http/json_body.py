"""Reads JSON bodies. Large bodies are read one after another, so that they leave memory and the
event loop to other requests.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.requests import Request

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex_services.common.callers import Caller
from loraplex_services.common.grpc.large_messages import LargeMessages
from loraplex_services.common.limits import (
    HTTP_BODY,
    MAX_BODY_S,
    MAX_JSON_BRACKETS,
    MAX_JSON_COMMAS,
    MAX_LARGE_BODIES,
    MAX_LARGE_BODIES_PER_TENANT,
    MAX_SMALL_MESSAGE_BYTES,
)
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.http.body import parse_object

MAX_BODY_BYTES = HTTP_BODY.max_message_bytes


class LargeBodies:
    """The large bodies of one server. `Guard` adds it to the state of every request."""

    def __init__(self, parsed: LargeMessages | None = None) -> None:
        self._read = TenantSlots(MAX_LARGE_BODIES, max_held=MAX_LARGE_BODIES_PER_TENANT)
        self._parsed = parsed or LargeMessages()

    async def read(self, request: Request, caller: Caller) -> dict[str, Any]:
        """Raises as `read_json`."""
        async with self._read.held(caller.tenant, "large bodies"):
            raw = await _read_timed(request)
            return await self.parse(raw, caller)

    async def parse(self, raw: bytes | bytearray, caller: Caller) -> dict[str, Any]:
        """A JSON object; large ones wait. Raises: InvalidRequest, ResourceExhausted."""
        await self.wait(caller, len(raw))
        return parse_object(raw)

    async def wait(self, caller: Caller, num_bytes: int) -> None:
        """Wait until `num_bytes` may be parsed or sent. Raises: ResourceExhausted."""
        await self._parsed.wait(caller, num_bytes)


async def read_json(request: Request, caller: Caller) -> dict[str, Any]:
    """The body as an object; large ones of a tenant wait for each other.

    Raises:
        InvalidRequest: for type, size and syntax.
        DeadlineExceeded: the body takes too long to arrive.
        ResourceExhausted: the tenant has too many large bodies waiting.
    """
    if (parsed := getattr(request.state, "fields", None)) is not None:
        return cast(dict[str, Any], parsed)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest.field(
            "content-type", media_type, "JSON bodies need content-type: application/json"
        )
    num_bytes = body_bytes(request)
    if num_bytes > MAX_BODY_BYTES:
        raise _too_large()
    if num_bytes <= MAX_SMALL_MESSAGE_BYTES:
        return parse_object(await _read_timed(request))
    bodies: LargeBodies = request.state.large_bodies
    return await bodies.read(request, caller)


def body_bytes(request: Request) -> int:
    """The declared size of a body; the largest allowed one if none is declared."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else MAX_BODY_BYTES


async def _read_timed(request: Request) -> bytearray:
    """Raises: DeadlineExceeded, InvalidRequest."""
    try:
        async with asyncio.timeout(MAX_BODY_S):
            return await _read_capped(request)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the body took longer than {MAX_BODY_S} s to arrive; send less, or faster",
            reason="BODY_TOO_SLOW",
        ) from None


async def _read_capped(request: Request) -> bytearray:
    """The body. Raises: InvalidRequest if it is too large, or has so many values that parsing it
    stops the event loop.

    Characters within strings count as well: to tell them apart takes as long as to parse the body.
    They are counted as they come, because that takes a millisecond for each megabyte.
    """
    body = bytearray()
    num_commas = num_brackets = 0
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        num_commas += chunk.count(b",")
        num_brackets += chunk.count(b"{") + chunk.count(b"[")
        check_values(num_commas, num_brackets)
    return body


def check_values(num_commas: int, num_brackets: int) -> None:
    """Raises: InvalidRequest if parsing would take too long."""
    for what, count, most in (
        ("commas", num_commas, MAX_JSON_COMMAS),
        ("opening brackets", num_brackets, MAX_JSON_BRACKETS),
    ):
        if count > most:
            raise InvalidRequest(
                f"the body has more than {most} {what}; send fewer", reason="BODY_TOO_COMPLEX"
            )


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        f"the body is larger than {MAX_BODY_BYTES} bytes; send less in one request",
        reason="BODY_TOO_LARGE",
    )
