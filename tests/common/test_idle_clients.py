"""Clients that open calls and neither send their requests nor read the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.serving.http2_flood import CHECK, ended_stream, opening
from loraplex.api.error_wire import from_rpc_error
from loraplex.errors import Unauthenticated
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common import limits
from loraplex_services.common.callers import Caller
from loraplex_services.common.grpc import anonymous_calls
from loraplex_services.common.grpc.server import LIVENESS, start

pytestmark = pytest.mark.hostile

NAME = "loraplex.v1.RegistryService"
MOST = 4


class Servicer(registry_pb2_grpc.RegistryServiceServicer):
    """Answers at once."""

    async def GetAdapter(
        self, request: pb.GetAdapterRequest, context: Any
    ) -> pb.GetAdapterResponse:
        return pb.GetAdapterResponse()

    async def SetTag(self, request: pb.SetTagRequest, context: Any) -> pb.SetTagResponse:
        return pb.SetTagResponse()


class TenantKeys:
    """Accepts any key; its text is the tenant."""

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if "authorization" not in metadata:
            raise Unauthenticated("no key")
        return Caller(metadata["authorization"], "k1", frozenset({"reader"}))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, Servicer(), NAME)
    running = await start([service], ["127.0.0.1:0"], auth=TenantKeys())
    yield running.port
    await running.stop(0)


@contextlib.asynccontextmanager
async def client(port: int, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """What a client that sends this receives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(30):
            yield reader
    finally:
        writer.close()


async def check_health(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))


async def call(port: int, tenant: str) -> str:
    """The reason why a call of a tenant is refused; "" if it is not."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        try:
            await stub.SetTag(pb.SetTagRequest(), metadata=[("authorization", tenant)])
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return ""


async def test_of_too_many_calls_without_a_key_and_a_request_the_oldest_one_ends(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anonymous_calls, "MAX_OPEN_STREAMS", MOST)
    async with client(port, opening(MOST + 1, path=CHECK)) as received:
        assert await ended_stream(received) == 1
        await check_health(port)
        assert await ended_stream(received) == 3


async def test_of_too_many_answers_without_a_key_that_nobody_reads_the_oldest_one_is_dropped(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anonymous_calls, "MAX_OPEN_STREAMS", MOST)
    async with client(port, opening(MOST + 1, asks=True, path=CHECK)) as received:
        with contextlib.suppress(ConnectionResetError):
            while await received.read(1 << 16):
                pass
    await check_health(port)


@pytest.mark.parametrize("asks", [False, True], ids=["no request", "no reader"])
async def test_the_idle_calls_of_one_tenant_are_limited_and_leave_others_theirs(
    port: int, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    most = limits.MethodLimits(max_calls_per_tenant=MOST, num_calls=1)
    monkeypatch.setattr(limits, "REGISTRY_DEFAULT", most)
    idle = opening(MOST + 1, asks=asks, path=f"/{NAME}/GetAdapter", key="globex")
    async with client(port, idle) as received:
        assert await ended_stream(received) == 2 * MOST + 1
        assert await call(port, "globex") == "TOO_MANY_CALLS"
        assert await call(port, "acme") == ""
    async with asyncio.timeout(30):
        while await call(port, "globex"):
            pass
