"""The small HTTP server for /metrics, /healthz and /readyz on LORAPLEX_METRICS_LISTEN.

Each service declares its metrics in a `metrics.py` of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from loraplex.errors import InvalidRequest

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
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
    ) -> None:
        self._ready = ready
        self._registry = registry
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, listen: str, setting: str = "LORAPLEX_METRICS_LISTEN") -> None:
        """Listen on `HOST:PORT`. Raises InvalidRequest naming the setting if it is taken."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._on_connection, host.strip("[]"), int(port), limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise InvalidRequest.field(
                setting, listen, f"cannot listen on {listen}: {error.strerror}; choose another port"
            ) from None
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
                writer.write(_encoded(*self._answer(head)))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            logger.debug("metrics connection dropped")
        finally:
            writer.close()

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return 400, _TEXT, b"bad request line\n"
        if words[0] != b"GET":
            return 405, _TEXT, b"only GET\n"
        path = words[1].split(b"?", 1)[0]
        if path == b"/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == b"/healthz":
            return _probe(True)
        if path == b"/readyz":
            return _probe(self._ready())
        return 404, _TEXT, b"try /metrics, /healthz or /readyz\n"


def _probe(good: bool) -> Answer:
    return (200, _TEXT, b"ok\n") if good else (503, _TEXT, b"not ready\n")


def _encoded(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
