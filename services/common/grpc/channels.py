"""Opens the gateway's gRPC channels to registry and workers."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from loraplex_services.common.security.tls import TlsFiles

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
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


class OpenChannel(Protocol):
    """Opens a channel to an address."""

    def __call__(self, address: str) -> grpc.aio.Channel: ...

    def to_name(self, server_name: str) -> OpenChannel:
        """Credentials for servers whose certificates contain `server_name`, not their address."""

    @property
    def version(self) -> int:
        """Increases when the files with which channels are opened were replaced."""


class PlainChannels:
    """Channels without TLS."""

    version = 0

    def __call__(self, address: str) -> grpc.aio.Channel:
        """To `HOST:PORT` or `unix:/path`; connects when first used."""
        return grpc.aio.insecure_channel(address, options=_OPTIONS)

    def to_name(self, server_name: str) -> OpenChannel:
        """Returns itself: without TLS, there are no certificates."""
        return self


class SecureChannels:
    """Channels with TLS; Unix sockets stay plain. Each reads the files as they are by then."""

    def __init__(self, tls: TlsFiles, server_name: str = "") -> None:
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
        if self._rotation.is_renewed():
            self._credentials = self._tls.channel()
            self._version += 1
        return self._version

    def to_name(self, server_name: str) -> OpenChannel:
        return SecureChannels(self._tls, server_name)

    def __call__(self, address: str) -> grpc.aio.Channel:
        if address.startswith("unix:") or self._credentials is None:
            return open_channel(address)
        return grpc.aio.secure_channel(address, self._credentials, options=self._options)


open_channel: OpenChannel = PlainChannels()


def channel_opener(tls: TlsFiles) -> OpenChannel:
    """What opens channels: with TLS if there is a CA."""
    return SecureChannels(tls) if tls.ca is not None else open_channel
