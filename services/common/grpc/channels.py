"""Opens the gateway's gRPC channels to registry and workers."""

from __future__ import annotations

from typing import Any

import grpc

from loraplex_services.common.security.tls import PLAIN, TlsFiles

_OPTIONS: list[tuple[str, Any]] = [
    # A server that hangs counts as away after 40 s. `grpc.keepalive_timeout_ms` would have no
    # effect: gRPC waits for the answer to a ping for as long as for that to any other.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    # Two links to one address must not share a connection that just died.
    ("grpc.use_local_subchannel_pool", 1),
]


class Channels:
    """Opens channels, with TLS if there is a CA; those to Unix sockets stay plain. Each reads the
    files as they are by then."""

    def __init__(self, tls: TlsFiles = PLAIN, server_name: str = "") -> None:
        """`server_name`: the name expected in the server's certificate instead of its address."""
        self._tls = tls
        self._rotation = tls.rotation()
        self._version = 0
        self._credentials = tls.channel()
        self._options = list(_OPTIONS)
        if server_name:
            self._options.append(("grpc.ssl_target_name_override", server_name))

    @property
    def version(self) -> int:
        """Increases when the files with which channels are opened were replaced."""
        if self._credentials is not None and self._rotation.is_renewed():
            self._credentials = self._tls.channel()
            self._version += 1
        return self._version

    def to_name(self, server_name: str) -> Channels:
        """Channels to servers whose certificates contain `server_name`, not their address."""
        return Channels(self._tls, server_name)

    def open(self, address: str) -> grpc.aio.Channel:
        """To `HOST:PORT` or `unix:/path`; connects when first used."""
        if address.startswith("unix:") or self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=self._options)


PLAIN_CHANNELS = Channels()
"""Without TLS."""
