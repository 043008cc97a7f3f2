"""How the gateway opens gRPC channels to its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from services.common.tls import TlsFiles

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


OpenChannel = Callable[[str], grpc.aio.Channel]


def channel_opener(tls: TlsFiles, server_name: str = "") -> OpenChannel:
    """What opens channels with TLS where there is a CA; Unix sockets and the rest stay plain.

    Args:
        server_name: expected in the server's certificate in place of its address.
    """
    credentials = tls.channel()
    if credentials is None:
        return open_channel
    options = list(_OPTIONS)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))

    def open_secure(address: str) -> grpc.aio.Channel:
        if address.startswith("unix:"):
            return open_channel(address)
        return grpc.aio.secure_channel(address, credentials, options=options)

    return open_secure


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain channel to `HOST:PORT` or `unix:/path`; connects when first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
