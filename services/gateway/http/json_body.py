"""Reads JSON bodies. Large ones wait for each other, so that parsing them leaves the event loop
free for all other requests most of the time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex_services.common.limits import (
    HTTP_BODY,
    MAX_JSON_BRACKETS,
    MAX_JSON_COMMAS,
    MAX_LARGE_BODIES,
    MAX_LARGE_BODIES_PER_TENANT,
    MAX_LARGE_BODY_S,
    MAX_SMALL_BODY_BYTES,
)
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.http.body import parse_object

MAX_BODY_BYTES = HTTP_BODY.max_message_bytes
_REST = 4.0
"""For each second that a large body was parsed, seconds until the next one is."""


class LargeBodies:
    """The large bodies of one server. `Guard` adds it to the state of every request."""

    def __init__(self, rest: float = _REST) -> None:
        self._rest = rest
        self._read = TenantSlots(MAX_LARGE_BODIES, max_held=MAX_LARGE_BODIES_PER_TENANT)
        self._parsed = TenantSlots(1)

    async def read(self, request: Request, tenant: str) -> dict[str, Any]:
        """Raises as `read_json`."""
        async with self._read.held(tenant, "large bodies"):
            try:
                async with asyncio.timeout(MAX_LARGE_BODY_S):
                    raw = await _read_capped(request)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the body took longer than {MAX_LARGE_BODY_S} s to arrive",
                    reason="BODY_TOO_SLOW",
                ) from None
            return await self.parse(raw, tenant)

    async def parse(self, raw: bytes, tenant: str) -> dict[str, Any]:
        """A JSON object; large ones wait. Raises: InvalidRequest, ResourceExhausted."""
        if len(raw) <= MAX_SMALL_BODY_BYTES:
            return parse_object(raw)
        _check_values(raw)
        await self._parsed.take(tenant, "large bodies")
        begin_s = time.perf_counter()
        try:
            return parse_object(raw)
        finally:
            rest_s = self._rest * (time.perf_counter() - begin_s)
            asyncio.get_running_loop().call_later(rest_s, self._parsed.give, tenant)


async def read_json(request: Request, tenant: str) -> dict[str, Any]:
    """The body as an object; large ones of `tenant` wait for each other.

    Raises:
        InvalidRequest: for type, size and syntax.
        DeadlineExceeded: a large body takes too long to arrive.
        ResourceExhausted: the tenant has too many large bodies waiting.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest.field(
            "content-type", media_type, "JSON bodies need content-type: application/json"
        )
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isdecimal() else MAX_BODY_BYTES
    if num_bytes > MAX_BODY_BYTES:
        raise _too_large()
    if num_bytes <= MAX_SMALL_BODY_BYTES:
        return parse_object(await _read_capped(request))
    bodies: LargeBodies = request.state.large_bodies
    return await bodies.read(request, tenant)


async def _read_capped(request: Request) -> bytes:
    """The body. Raises: InvalidRequest if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _check_values(raw: bytes) -> None:
    """Raises InvalidRequest if the body has so many values that parsing it stops the event loop.

    Characters within strings count, too: to tell them apart takes as long as to parse the body.
    """
    for what, count, most in (
        ("commas", raw.count(b","), MAX_JSON_COMMAS),
        ("opening brackets", raw.count(b"{") + raw.count(b"["), MAX_JSON_BRACKETS),
    ):
        if count > most:
            raise InvalidRequest(
                f"the body has {count} {what}; send at most {most}", reason="BODY_TOO_COMPLEX"
            )


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        f"the body is larger than {MAX_BODY_BYTES} bytes", reason="BODY_TOO_LARGE"
    )
