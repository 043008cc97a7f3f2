"""Asks the health service of another server."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_services.common.grpc.channels import PLAIN_CHANNELS

TIMEOUT_S = 2.0


async def is_serving(address: str, service: str = "readiness") -> bool:
    """Whether the server at `address` answers SERVING for `service`.

    A fresh connection each time: a refused one would wait out a growing pause of its own.
    """
    async with PLAIN_CHANNELS.open(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
