"""The small HTTP server for /metrics, /healthz and /readyz on LORAPLEX_METRICS_LISTEN, and for
/debug/stacks, /debug/profile?seconds=N and /debug/state, which need the service token.

Each service declares its metrics in a `metrics.py` of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from loraplex.errors import InvalidRequest
from loraplex_services.common.processes.stacks import all_stacks, profile
from loraplex_services.common.security.addresses import is_local, is_loopback
from loraplex_services.common.security.service_token import is_service_token
from loraplex_services.common.settings import env

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_PROFILE_S = 60.0
_PROFILE_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_OPEN_METRICS = "application/openmetrics-text"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    503: "Service Unavailable",
}

Answer = tuple[int, str, bytes]
"""HTTP status, content type, body."""


class MetricsServer:
    """Answers probes and scrapes; one request a connection."""

    def __init__(
        self,
        ready: Callable[[], bool],
        registry: CollectorRegistry = REGISTRY,
        service_token: str = "",
        state: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        """
        Args:
            service_token: what `read_service_token` gave; empty = no debugging over HTTP.
            state: what the service is doing now, for JSON; it is bounded and has no user text.
        """
        self._ready = ready
        self._state = state
        self._registry = registry
        self._service_token = service_token
        self._is_profiling = False
        self._is_local = False
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, listen: str) -> None:
        """Listen on `HOST:PORT`. Raises InvalidRequest naming the setting if it is taken."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._on_connection, host.strip("[]"), int(port), limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise InvalidRequest.field(
                env.METRICS_LISTEN.name,
                listen,
                f"cannot listen on {listen}: {error.strerror}; choose another port",
            ) from None
        self._is_local = is_local(listen)
        self.port = self._server.sockets[0].getsockname()[1]
        logger.info("metrics listening", extra={"port": self.port})

    async def stop(self) -> None:
        """Close the listening socket."""
        if self._server is not None:
            self._server.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = await self._debug(head) if _is_debug(head) else self._answer(head)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(_encoded(*answer))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            logger.debug("metrics connection dropped")
        finally:
            writer.close()

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return 400, _TEXT, b"bad request line\n"
        path = words[1].split(b"?", 1)[0]
        if words[0] != b"GET":
            return 405, _TEXT, b"%s does not take %s: use GET\n" % (path, words[0])
        if path == b"/metrics":
            host = _header(head.decode("latin-1"), "host").lower()
            if self._is_local and host and not (is_loopback(host) or is_local(host)):
                # A page whose name was rebound to this machine, in a browser here.
                return 403, _TEXT, b"call this address by a loopback name\n"
            return 200, *self._scrape(head)
        if path == b"/healthz":
            return _probe(True)
        if path == b"/readyz":
            return _probe(self._ready())
        return 404, _TEXT, b"try /metrics, /healthz or /readyz\n"

    def _scrape(self, head: bytes) -> tuple[str, bytes]:
        """Content type and metrics; OpenMetrics, with exemplars, for scrapers that take it.

        The library's own choice would replace the colon of vLLM's names for Prometheus 2.
        """
        if _OPEN_METRICS in _header(head.decode("latin-1"), "accept"):
            encode: Callable[..., bytes] = openmetrics.generate_latest
            body = encode(self._registry, openmetrics.ALLOWUTF8)
            return f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8", body
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    async def _debug(self, head: bytes) -> Answer:
        """The stacks, the state or a profile of this process; only with the service token."""
        target, _, rest = head.decode("latin-1").split(" ", 1)[1].partition(" ")
        if not is_service_token(_bearer_token(rest), self._service_token):
            return 401, _TEXT, b"show the service token: authorization: Bearer TOKEN\n"
        url = urlsplit(target)
        if url.path == "/debug/stacks":
            return 200, _TEXT, all_stacks().encode()
        if url.path == "/debug/state" and self._state is not None:
            return 200, _JSON, json.dumps(self._state(), indent=1).encode() + b"\n"
        if url.path != "/debug/profile":
            return 404, _TEXT, self._debug_paths().encode()
        seconds = _seconds(parse_qs(url.query).get("seconds", [str(_PROFILE_S)])[0])
        if seconds is None:
            return 400, _TEXT, f"seconds: a number above 0, at most {MAX_PROFILE_S:g}\n".encode()
        if self._is_profiling:
            return 409, _TEXT, b"a profile is being taken; try again when it has ended\n"
        self._is_profiling = True
        try:
            return 200, _TEXT, (await asyncio.to_thread(profile, seconds)).encode()
        finally:
            self._is_profiling = False

    def _debug_paths(self) -> str:
        state = "" if self._state is None else "/debug/state, "
        return f"try {state}/debug/stacks or /debug/profile?seconds=5\n"


def _is_debug(head: bytes) -> bool:
    return head.startswith(b"GET /debug/")


def _bearer_token(head: str) -> str:
    """The token of the authorization header, or ""."""
    scheme, _, token = _header(head, "authorization").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _header(head: str, wanted: str) -> str:
    """The value of a header, or ""."""
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == wanted:
            return value.strip()
    return ""


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_PROFILE_S else None


def _probe(good: bool) -> Answer:
    return (200, _TEXT, b"ok\n") if good else (503, _TEXT, b"not ready\n")


def _encoded(status: int, content_type: str, body: bytes) -> bytes:
    allow = "allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n{allow}content-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
