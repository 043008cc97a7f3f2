"""A real server: errors cross whole, health follows readiness, taken ports are named."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.api.error_wire import from_rpc_error
from loraplex.errors import (
    InvalidAdapter,
    InvalidRequest,
    LoraplexError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unsupported,
    Violation,
)
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.callers import Caller, current_caller
from loraplex_services.common.grpc.server import RunningServer, serve, start

NAME = "loraplex.v1.RegistryService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RegistryLookup(registry_pb2_grpc.RegistryServiceServicer):
    """Raises `error` from one method of each shape; otherwise answers who called."""

    error: Exception | None = None

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def GetUpload(self, request: pb.GetUploadRequest, context: Any) -> pb.GetUploadResponse:
        self._fail()
        return pb.GetUploadResponse(upload_id=current_caller.get().tenant)

    async def UploadPart(
        self, request_iterator: AsyncIterator[pb.UploadPartRequest], context: Any
    ) -> pb.UploadPartResponse:
        async for _ in request_iterator:
            self._fail()
        return pb.UploadPartResponse()

    async def DownloadAdapter(
        self, request: pb.DownloadAdapterRequest, context: Any
    ) -> AsyncIterator[pb.DownloadAdapterResponse]:
        yield pb.DownloadAdapterResponse()
        self._fail()

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Any
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        yield pb.WatchAdaptersResponse(resume_token=current_caller.get().tenant)


class TenantAuth:
    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if "authorization" not in metadata:
            raise Unauthenticated("no key: set LORAPLEX_API_KEY")
        return Caller(metadata["authorization"], "k1", frozenset({"reader"}))


async def _running(servicer: RegistryLookup, **options: Any) -> RunningServer:
    service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, servicer, NAME)
    return await start([service], ["127.0.0.1:0"], **options)


@pytest.fixture
async def lookup() -> AsyncIterator[tuple[RegistryLookup, registry_pb2_grpc.RegistryServiceStub]]:
    servicer = RegistryLookup()
    running = await _running(servicer)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield servicer, registry_pb2_grpc.RegistryServiceStub(channel)
    await running.stop(0)


async def _failures(stub: Any) -> list[LoraplexError]:
    """The error that each method shape reports."""

    async def parts() -> AsyncIterator[pb.UploadPartRequest]:
        yield pb.UploadPartRequest()

    async def drained(stream: Any) -> None:
        async for _ in stream:
            pass

    calls = [
        stub.GetUpload(pb.GetUploadRequest()),
        stub.UploadPart(parts()),
        drained(stub.DownloadAdapter(pb.DownloadAdapterRequest())),
    ]
    failures = []
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        failures.append(from_rpc_error(caught.value))
    return failures


async def test_error_crosses_with_class_violations_values_and_retry_hint(lookup: Any) -> None:
    servicer, stub = lookup
    sent = InvalidAdapter.of(
        [
            Violation.of("adapter_config.json:r", 512, "above the limit of 256"),
            Violation.of("adapter_config.json:bias", "all", "not served"),
        ]
    )
    servicer.error = sent
    for got in await _failures(stub):
        assert type(got) is InvalidAdapter
        assert (got.message, got.reason) == (sent.message, sent.reason)
        assert got.violations == sent.violations
    servicer.error = ResourceExhausted("quota", reason="TENANT_BYTES", retry_after_s=1.25)
    for got in await _failures(stub):
        assert type(got) is ResourceExhausted
        assert (got.reason, got.retry_after_s) == ("TENANT_BYTES", 1.25)


async def test_huge_list_of_violations_still_arrives_as_the_right_error(lookup: Any) -> None:
    servicer, stub = lookup
    violations = [Violation.of(f"field{i}", "x" * 5000, "y" * 300) for i in range(500)]
    servicer.error = InvalidAdapter.of(violations)
    for got in await _failures(stub):
        assert type(got) is InvalidAdapter
        assert got.violations[0] == violations[0]


async def test_unknown_exception_is_internal_and_does_not_leak(
    lookup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, stub = lookup
    servicer.error = RuntimeError("secret path")
    with caplog.at_level(logging.ERROR):
        for got in await _failures(stub):
            assert type(got) is LoraplexError
            assert "secret" not in got.message
    assert "secret path" in caplog.text


async def test_retry_policies_of_other_clients_apply_to_refused_calls() -> None:
    """gRPC does not try a call again whose answer began with headers of its own."""
    servicer = RegistryLookup()
    running = await _running(servicer)
    num_calls = 0

    def count_and_fail(self: RegistryLookup) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3:
            raise Unavailable("not yet")

    servicer._fail = count_and_fail.__get__(servicer)  # type: ignore[method-assign]
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    options = [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", options) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        assert (await stub.GetUpload(pb.GetUploadRequest())).upload_id == "default"
        await stub.UploadPart(iter([pb.UploadPartRequest()]))
    await running.stop(0)
    assert num_calls == 6


async def test_method_without_a_handler_is_unsupported_by_name(lookup: Any) -> None:
    _, stub = lookup
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Reindex(pb.ReindexRequest())
    got = from_rpc_error(caught.value)
    assert type(got) is Unsupported
    assert "Reindex" in got.message


async def test_auth_identifies_the_caller_of_unary_and_stream_calls() -> None:
    running = await _running(RegistryLookup(), auth=TenantAuth())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for got in await _failures(stub):
            assert type(got) is Unauthenticated
        key = (("authorization", "acme"),)
        answer = await stub.GetUpload(pb.GetUploadRequest(), metadata=key)
        assert answer.upload_id == "acme"
        async for event in stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=key):
            assert event.resume_token == "acme"
    await running.stop(0)


class OpenWatch(RegistryLookup):
    """Watches that say one thing, another when told to, and then go on without more."""

    num_open = 0

    def __init__(self) -> None:
        self.next = asyncio.Event()

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Any
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        self.num_open += 1
        try:
            yield pb.WatchAdaptersResponse(resume_token="1")
            await self.next.wait()
            yield pb.WatchAdaptersResponse(resume_token="2")
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


class EndingAuth(TenantAuth):
    """Admits callers until it is told how checks of their key fail."""

    failure: LoraplexError | None = None

    def __init__(self) -> None:
        self.has_failed = asyncio.Event()

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if self.failure is not None:
            self.has_failed.set()
            raise self.failure
        return await super().check(method, metadata)


async def test_an_open_watch_ends_with_the_key_of_its_caller() -> None:
    auth, servicer = EndingAuth(), OpenWatch()
    running = await _running(servicer, auth=auth)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        key = (("authorization", "acme"),)
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=key, timeout=60)
        assert (await watch.read()).resume_token == "1"
        assert servicer.num_open == 1
        auth.failure = Unauthenticated("the API key was revoked")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch.read()
        assert from_rpc_error(refused.value).message == "the API key was revoked"
        assert servicer.num_open == 0
    await running.stop(0)


async def test_an_open_watch_goes_on_while_nobody_can_check_the_key_of_its_caller() -> None:
    auth, servicer = EndingAuth(), OpenWatch()
    running = await _running(servicer, auth=auth)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        key = (("authorization", "acme"),)
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=key, timeout=60)
        assert (await watch.read()).resume_token == "1"
        auth.failure = Unavailable("Redis is away")
        await auth.has_failed.wait()
        servicer.next.set()
        assert (await watch.read()).resume_token == "2"
    await running.stop(0)


async def test_a_watch_whose_caller_left_is_closed() -> None:
    servicer = OpenWatch()
    running = await _running(servicer, auth=EndingAuth())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        key = (("authorization", "acme"),)
        watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=key)
        await watch.read()
        watch.cancel()
        async with asyncio.timeout(20):
            while servicer.num_open:
                await asyncio.sleep(0.01)
    await running.stop(0)


async def test_health_is_live_at_once_and_ready_when_set() -> None:
    running = await _running(RegistryLookup())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> list[int]:
            names = ("liveness", "readiness", "", NAME)
            checks = [stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            return [answer.status for answer in [await check for check in checks]]

        assert await statuses() == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
        await running.set_ready(True)
        assert await statuses() == [SERVING] * 4
        await running.set_ready(False)
        assert await statuses() == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
    await running.stop(0)


async def test_taken_port_is_refused_naming_port_and_setting() -> None:
    running = await _running(RegistryLookup())
    with pytest.raises(InvalidRequest) as caught:
        await start([], [f"127.0.0.1:{running.port}"], setting="--registry-port")
    assert caught.value.violations[0].field == "--registry-port"
    assert str(running.port) in caught.value.message
    await running.stop(0)


async def test_unix_socket_is_private_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    path.write_text("left by a dead server")
    service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, RegistryLookup(), NAME)
    running = await start([service], [f"unix:{path}"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        assert (await stub.GetUpload(pb.GetUploadRequest())).upload_id == "default"
    await running.stop(0)


async def test_serve_turns_readiness_off_before_it_drains() -> None:
    running = await _running(RegistryLookup())
    await running.set_ready(True)
    stopping = asyncio.Event()
    seen: list[bool] = []

    async def drain() -> None:
        seen.append(running.ready)

    stopping.set()
    await serve(running, drain=drain, drain_s=1, stopping=stopping)
    assert seen == [False]
