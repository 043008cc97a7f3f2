"""Runs the HTTP app on the gateway's own event loop, with its own bind and drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from loraplex.errors import InvalidRequest
from loraplex_services.common.security.rotation import Rotation
from loraplex_services.common.security.tls import TlsFiles
from loraplex_services.gateway.http.connections import TimedProtocol

logger = logging.getLogger(__name__)
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """One listening socket and the server behind it."""

    def __init__(self, app: ASGIApp, listen: str, *, setting: str, tls: TlsFiles) -> None:
        """Binds at once. Raises: InvalidRequest naming `setting` if the address is in use."""
        self._socket = _bound(listen, setting)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=75,
            ssl_certfile=tls.cert,
            ssl_keyfile=tls.key,
        )
        if tls.cert is not None and tls.key is not None:
            config.load()
            _renew(config.ssl, tls.cert, tls.key)
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task
        logger.info("http listening", extra={"port": self.port})

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, wait up to `grace_s` for running responses, then cut them."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=grace_s + 2)
        self._socket.close()


def _renew(context: ssl.SSLContext | None, cert: Path, key: Path) -> None:
    """Check at every handshake whether the files were replaced. Mutates: context."""
    assert context is not None, "a certificate was given"
    rotation = Rotation(None, pair=(cert, key))

    def before_handshake(
        connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, current: ssl.SSLContext
    ) -> None:
        if rotation.is_renewed():
            current.load_cert_chain(cert, key)
            # This connection already copied the old pair from `current`.
            fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            fresh.load_cert_chain(cert, key)
            connection.context = fresh

    context.sni_callback = before_handshake


def _bound(listen: str, setting: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise InvalidRequest.field(
            setting,
            listen,
            f"cannot listen on {listen}: {error.strerror}; choose another port, or 0 for any free "
            "one",
        ) from None
    listener.setblocking(False)
    return listener
