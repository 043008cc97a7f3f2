"""The gRPC server of every service, with health checks, reflection, limits and drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from loraplex.allocation import reuse_large_blocks
from loraplex.errors import InvalidRequest
from loraplex_services.common.callers import Auth
from loraplex_services.common.grpc.interceptor import CallInterceptor
from loraplex_services.common.grpc.open_calls import OpenCalls
from loraplex_services.common.grpc.waiting_calls import COUNTED, WaitingCalls
from loraplex_services.common.limits import (
    MAX_STREAMS_PER_CONNECTION,
    MAX_UNREAD_BYTES,
    max_receive_bytes,
)
from loraplex_services.common.processes.signals import stop_event
from loraplex_services.common.security.rotation import Rotation

logger = logging.getLogger(__name__)

LIVENESS = "liveness"
READINESS = "readiness"
MAX_SEND_BYTES = 64 << 20
"""A worker's answer may carry a whole tokenizer."""

# Without so_reuseport=0 a second server would share a taken port silently. Clients ping every 30 s.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    COUNTED,
    # gRPC unpacks a message before it compares its size with the limit, and 0.5 MiB may become
    # 0.5 GiB. Bit 0 stands for messages without compression.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # By default, the window of a call grows to all that its client sends, read or not: a refused
    # call would cost as much as one that is served.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", MAX_UNREAD_BYTES),
]

Service = tuple[Callable[[Any, grpc.aio.Server], None], object, str]
"""(add_XServicer_to_server, servicer, full name such as "loraplex.v1.RegistryService")."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The files of a server with TLS."""

    cert: Path
    """PEM chain of the server."""
    key: Path
    """PEM private key of the server."""
    client_ca: Path | None = None
    """When set, clients must show a certificate of this CA (mTLS)."""

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files, and again at the first handshake after they were replaced."""
        rotation = Rotation(self.client_ca, pair=(self.cert, self.key))

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            return self._configuration() if rotation.is_renewed() else None

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            renewed,  # type: ignore[arg-type]  # None = nothing new, which the stubs leave out
            require_client_authentication=bool(self.client_ca),
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        root = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], root)


class RunningServer:
    """A started server. Live while it answers, ready once `set_ready(True)` is called."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: Any,
        names: Sequence[str],
        ports: list[int],
        open_calls: OpenCalls,
        waiting_calls: WaitingCalls,
    ) -> None:
        self._server = server
        self._waiting_calls = waiting_calls
        self._bounding: asyncio.Task[None] | None = None
        self._health = health_servicer
        self._names = ("", READINESS, *names)
        self._ports = ports
        self.ready = False
        self.open_calls = open_calls

    @property
    def port(self) -> int:
        """The first TCP port; 0 when only Unix sockets are served."""
        return next((port for port in self._ports if port > 1), 0)

    @property
    def ports(self) -> Sequence[int]:
        """The port of each address; 1 for Unix sockets."""
        return tuple(self._ports)

    async def set_ready(self, ready: bool) -> None:
        """Set what `readiness`, the empty name and each service name report."""
        self.ready = ready
        for name in self._names:
            await self._health.set(name, _serving(ready))

    async def start(self) -> None:
        """Take calls, as long as not too many wait."""
        await self._server.start()
        ports = {port for port in self._ports if port > 1}
        self._bounding = asyncio.create_task(self._waiting_calls.bound(ports))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s`, then cancel them."""
        if self._bounding is not None:
            self._bounding.cancel()
            await asyncio.wait([self._bounding])  # it holds the sockets that accept connections
        await self._server.stop(grace_s)


async def start(
    services: Sequence[Service],
    listen: Sequence[str],
    *,
    auth: Auth | None = None,
    tls: ServerTls | None = None,
    service_listener: tuple[str, ServerTls] | None = None,
    setting: str = "--listen",
) -> RunningServer:
    """Start serving; not ready yet.

    Args:
        listen: `HOST:PORT` (port 0 = any free one) or `unix:/path` addresses.
        service_listener: one more address, whose callers must show a certificate.
        setting: flag or variable to name when an address cannot be had.

    Raises:
        InvalidRequest: an address is taken or malformed; names address and setting.
    """
    reuse_large_blocks()
    names = [name for _, _, name in services]
    options = [*_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes(names))]
    open_calls, waiting_calls = OpenCalls(), WaitingCalls()
    interceptor = CallInterceptor(auth, open_calls, waiting_calls)
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    for add, servicer, _ in services:
        add(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    listeners = [(address, tls) for address in listen] + (
        [service_listener] if service_listener else []
    )
    ports = [_bind(server, address, listener_tls, setting) for address, listener_tls in listeners]
    if any(port > 1 for port in ports):
        waiting_calls.watch(server)
    running = RunningServer(server, health_servicer, names, ports, open_calls, waiting_calls)
    # A server that hangs does not answer, and a worker restarts a silent engine by itself.
    await health_servicer.set(LIVENESS, _serving(True))
    await running.set_ready(False)
    await running.start()
    logger.info("listening", extra={"addresses": ",".join(listen), "port": running.port})
    return running


async def serve(
    running: RunningServer,
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    drain_s: float = 20.0,
    stopping: asyncio.Event | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

    Args:
        drain: called after readiness is off and before calls are refused; bounded by `drain_s`.
        drain_s: longest time for `drain` and for running calls, together.
        stopping: event to wait for instead of the signals' own.
    """
    await (stopping or stop_event()).wait()
    logger.info("draining", extra={"drain_s": drain_s})
    deadline_s = asyncio.get_running_loop().time() + drain_s
    await running.set_ready(False)
    if drain is not None:
        try:
            await asyncio.wait_for(drain(), drain_s)
        except TimeoutError:
            logger.warning("drain timed out", extra={"drain_s": drain_s})
    await running.stop(max(0.0, deadline_s - asyncio.get_running_loop().time()))
    logger.info("stopped")


def _serving(yes: bool) -> int:
    status = health_pb2.HealthCheckResponse
    return int(status.SERVING if yes else status.NOT_SERVING)


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None, setting: str) -> int:
    """Returns the port, or 1 for a Unix socket."""
    if address.startswith("unix:"):
        return _bind_unix(server, address, setting)
    try:
        if tls is not None:
            return server.add_secure_port(address, tls.credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidRequest.field(
            setting,
            address,
            f"cannot listen on {address}: it is taken or no address of this machine; choose "
            "another port, or 0 for any free one",
        ) from error


def _bind_unix(server: grpc.aio.Server, address: str, setting: str) -> int:
    """Sockets are private to the user. A stale file of a dead server is replaced."""
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path)) > 100:
        raise InvalidRequest.field(
            setting, address, "socket paths are at most 100 bytes; choose a shorter state folder"
        )
    path.unlink(missing_ok=True)
    umask = os.umask(0o177)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidRequest.field(
            setting, address, f"cannot create the socket {path}: {error}"
        ) from error
    finally:
        os.umask(umask)
