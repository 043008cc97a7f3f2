"""Checks every HTTP request first: Host header, request id, size and type of the body."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.errors import InvalidRequest, LoraplexError, PermissionDenied
from loraplex_services.common.limits import MAX_BODY_S
from loraplex_services.common.security.addresses import is_loopback
from loraplex_services.common.security.wrong_keys import current_peer, peer_of_host
from loraplex_services.gateway.http.errors import refusal
from loraplex_services.gateway.http.json_body import LargeBodies
from loraplex_services.gateway.http.unread import AnswerParts
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes

_MAX_DISCARDED_BYTES = 64 << 20
_DISCARD_IDLE_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:@]*))(?::[0-9]*)?")
_PROBES = frozenset({"/healthz", "/health", "/readyz"})


@dataclass(frozen=True, slots=True)
class HostRule:
    """Accepted Host headers; protects a server without auth from pages of other sites."""

    allowed: frozenset[str]
    """Names besides loopback; "*" = any."""

    def allows(self, host_header: str) -> bool:
        """True for loopback and allowed names, with or without a port."""
        host = _host_of(host_header).lower()
        return host in self.allowed or "*" in self.allowed or is_loopback(host)


class Guard:
    """ASGI middleware around the app."""

    def __init__(self, app: ASGIApp, hosts: HostRule | None, collected: CollectedBytes) -> None:
        """`hosts` is None if callers authenticate. `collected` counts large answers."""
        self._app = app
        self._collected = collected
        self._hosts = hosts
        self._large_bodies = LargeBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request an id, answer it or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get("x-request-id", ""))
        state = scope.setdefault("state", {})
        state["request_id"], state["large_bodies"] = request_id, self._large_bodies
        client = scope.get("client")
        current_peer.set(peer_of_host(client[0]) if client else "")

        intake = _Intake(receive)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = sent["request-id"] = request_id
            elif not message.get("more_body") and not intake.is_over and "expect" not in headers:
                await send({**message, "more_body": True})
                await intake.discard()
                message = {"type": "http.response.body"}
            await send(message)

        host = headers.get("host", "")
        if self._hosts and scope["path"] not in _PROBES and not self._hosts.allows(host):
            error: LoraplexError = PermissionDenied(
                "without auth this Host header is not allowed; call the gateway by a loopback "
                "name, or add the name to LORAPLEX_ALLOWED_HOSTS",
                reason="HOST_NOT_ALLOWED",
            )
            await _refuse(send_with_id, error, scope["path"])
            return
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy that reads it differently would take its end for another request.
            error = InvalidRequest("send content-length or transfer-encoding, and not both")
            await _refuse(send_with_id, error, scope["path"])
            return
        await self._app(scope, intake, AnswerParts(scope, send_with_id, self._collected))


class _Intake:
    """The body of a request as it comes in.

    If a request is answered before its body was read (too large, no key), the rest is dropped
    before the connection closes. Clients that send everything before they read would otherwise see
    a broken pipe.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_over = False
        """True after the last part of the body."""

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_over = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Discard the rest of the body, up to limits of size and time, or until no more data
        arrives."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_BODY_S):
                while not self.is_over and num_bytes < _MAX_DISCARDED_BYTES:
                    async with asyncio.timeout(_DISCARD_IDLE_S):
                        num_bytes += len((await self()).get("body", b""))


def request_id_of(given: str) -> str:
    """The client's id if it is safe in logs, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _host_of(header: str) -> str:
    """`[::1]:80` -> `::1`, `localhost:80` -> `localhost`; "" if it is not a host."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2]) if match else ""


async def _refuse(send: Send, error: LoraplexError, path: str) -> None:
    start, body = refusal(error, path)
    start["headers"].append((b"connection", b"close"))
    await send(start)
    await send({"type": "http.response.body", "body": body})


def check_origin(request: Request) -> None:
    """Refuse what a page of another site sends. Calls whose body is not JSON need this: a browser
    sends them to a server without auth on its own machine. Raises: PermissionDenied."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise PermissionDenied("pages of other sites may not call this")


def authorization_of(request: Request) -> str:
    """The header with the caller's key, whether it came as OpenAI's or as Anthropic's clients send
    it."""
    key = request.headers.get("x-api-key", "")
    return request.headers.get("authorization", f"Bearer {key}" if key else "")


def api_key_of(request: Request) -> str:
    """The key that a request was sent with; "" without one."""
    return authorization_of(request).partition(" ")[2].strip()
