"""How the gateway opens gRPC channels to its neighbours."""

from __future__ import annotations

from typing import Any

import grpc

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


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain channel to `HOST:PORT` or `unix:/path`; connects when first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
