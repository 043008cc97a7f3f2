"""What strangers and tenants can make a gRPC server do, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import resource
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.serving.http2_flood import num_refused
from loraplex.api.error_wire import from_rpc_error
from loraplex.errors import InvalidRequest, ResourceExhausted, Unauthenticated
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common import limits
from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.common.grpc import call_rates
from loraplex_services.common.grpc import interceptor as grpc_interceptor
from loraplex_services.common.grpc.large_messages import LargeMessages
from loraplex_services.common.grpc.open_calls import OpenCalls
from loraplex_services.common.grpc.server import LIVENESS, start

pytestmark = pytest.mark.hostile

NAME = "loraplex.v1.RegistryService"
CREATE_UPLOAD = f"/{NAME}/CreateUpload"
EMPTY_FILE = b"\x12\x00"
"""An empty FileSpec of a CreateUploadRequest: two bytes that take 66 when parsed."""


class CountingServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Counts calls; a watch lasts until its client leaves."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def CreateUpload(
        self, request: pb.CreateUploadRequest, context: Any
    ) -> pb.CreateUploadResponse:
        self.num_calls += 1
        return pb.CreateUploadResponse()

    async def UploadPart(
        self, request_iterator: AsyncIterator[pb.UploadPartRequest], context: Any
    ) -> pb.UploadPartResponse:
        async for _ in request_iterator:
            self.num_calls += 1
        return pb.UploadPartResponse()

    async def WatchAdapters(
        self, request: pb.WatchAdaptersRequest, context: Any
    ) -> AsyncIterator[pb.WatchAdaptersResponse]:
        self.num_calls += 1
        yield pb.WatchAdaptersResponse(resume_token="1:1")
        await asyncio.Event().wait()


class TenantKeys:
    """Accepts any key; its text is the tenant."""

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if "authorization" not in metadata:
            raise Unauthenticated("no key")
        tenant = metadata["authorization"]
        return Caller(tenant, "service" if tenant == "gateway" else "k1", frozenset({"reader"}))


@pytest.fixture
def resting_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large message of a tenant, its next one waits for good."""
    resting = functools.partial(LargeMessages, share=1e-9)
    monkeypatch.setattr(grpc_interceptor, "LargeMessages", resting)


@pytest.fixture
async def server() -> AsyncIterator[tuple[CountingServicer, grpc.aio.Channel]]:
    servicer = CountingServicer()
    service = (registry_pb2_grpc.add_RegistryServiceServicer_to_server, servicer, NAME)
    running = await start([service], ["127.0.0.1:0"], auth=TenantKeys())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield servicer, channel
    await running.stop(0)


def _key(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", tenant),)


async def _refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def test_a_number_outside_its_range_is_answered_with_bounds_that_people_can_read() -> None:
    with pytest.raises(InvalidRequest, match=r"a number from 3,600 to 2,592,000"):
        limits.FILE_LIFETIME_S.check("expires_after.seconds", 3599)


async def test_message_without_a_key_is_refused_before_it_takes_memory(server: Any) -> None:
    servicer, channel = server
    create = channel.unary_unary(CREATE_UPLOAD)
    body = EMPTY_FILE * (limits.DEFAULT.max_message_bytes // 2)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        refusals = await asyncio.gather(*[_refusal(create(body)) for _ in range(4)])
        assert {type(refusal) for refusal in refusals} == {Unauthenticated}
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 24 << 10, "client and server together; one parsed message takes 33 MiB"
    assert servicer.num_calls == 0


async def test_after_a_large_message_of_a_tenant_its_next_one_waits_and_those_of_others_do_not(
    resting_tenants: None, server: Any
) -> None:
    servicer, channel = server
    create = channel.unary_unary(CREATE_UPLOAD)
    body = EMPTY_FILE * limits.MAX_SMALL_MESSAGE_BYTES
    await create(body, metadata=_key("globex"))
    later = create(body, metadata=_key("globex"))
    for tenant in ("acme", "gateway", "gateway"):
        await create(body, metadata=_key(tenant))
    await create(b"", metadata=_key("globex"))
    assert servicer.num_calls == 5 and not later.done()
    later.cancel()


async def test_message_above_its_methods_limit_is_refused_without_parsing(server: Any) -> None:
    servicer, channel = server
    body = EMPTY_FILE * (limits.DEFAULT.max_message_bytes // 2 + 1)
    refusal = await _refusal(channel.unary_unary(CREATE_UPLOAD)(body, metadata=_key("acme")))
    assert (type(refusal), refusal.reason) == (ResourceExhausted, "MESSAGE_TOO_LARGE")
    assert servicer.num_calls == 0


async def test_message_of_a_stream_above_its_limit_ends_the_call(server: Any) -> None:
    servicer, channel = server
    part = b"\x00" * (limits.limits_of(f"/{NAME}/UploadPart").max_message_bytes + 1)
    call = channel.stream_unary(f"/{NAME}/UploadPart")(iter([part]), metadata=_key("acme"))
    assert (await _refusal(call)).reason == "MESSAGE_TOO_LARGE"
    assert servicer.num_calls == 0


async def test_malformed_message_is_an_invalid_request(server: Any) -> None:
    _, channel = server
    refusal = await _refusal(channel.unary_unary(CREATE_UPLOAD)(b"\x12", metadata=_key("acme")))
    assert type(refusal) is InvalidRequest


async def test_unary_call_without_a_message_is_an_invalid_request(server: Any) -> None:
    _, channel = server
    call = channel.stream_unary(CREATE_UPLOAD)(iter([]), metadata=_key("acme"))
    assert type(await _refusal(call)) is InvalidRequest


async def test_one_tenants_watches_leave_space_for_those_of_others(server: Any) -> None:
    _, channel = server
    watch = registry_pb2_grpc.RegistryServiceStub(channel).WatchAdapters
    most = limits.limits_of(f"/{NAME}/WatchAdapters").max_calls_per_tenant

    async def opened(tenant: str) -> Any:
        call = watch(pb.WatchAdaptersRequest(), metadata=_key(tenant))
        await call.read()
        return call

    held = [await opened("globex") for _ in range(most)]
    refusal = await _refusal(opened("globex"))
    assert (type(refusal), refusal.reason) == (ResourceExhausted, "TOO_MANY_CALLS")
    held.append(await opened("acme"))
    held += [await opened("gateway") for _ in range(most + 1)]
    held.pop(0).cancel()
    async with asyncio.timeout(5):
        while True:  # The server notices a cancelled call a moment later.
            try:
                held.append(await opened("globex"))
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
    for call in held:
        call.cancel()


async def test_strangers_hold_a_limited_number_of_streams_and_health_is_answered_all_the_same(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_interceptor, "MAX_OPEN_STREAMS", 3)
    stub: Any = health_pb2_grpc.HealthStub(server[1])
    asked = health_pb2.HealthCheckRequest(service=LIVENESS)

    async def opened() -> Any:
        watch = stub.Watch(asked)
        assert await watch.read() is not grpc.aio.EOF
        return watch

    held = [await opened() for _ in range(3)]
    refusal = await _refusal(opened())
    assert (type(refusal), refusal.reason) == (ResourceExhausted, "TOO_MANY_CALLS")
    await stub.Check(asked)
    held.pop().cancel()
    async with asyncio.timeout(5):
        while len(held) < 3:  # The server notices a cancelled call a moment later.
            with contextlib.suppress(grpc.aio.AioRpcError):
                held.append(await opened())
    for watch in held:
        watch.cancel()


async def test_streams_beyond_the_limit_of_a_connection_are_refused_before_they_cost_memory() -> (
    None
):
    running = await start([], ["127.0.0.1:0"])
    most = limits.MAX_STREAMS_PER_CONNECTION
    try:
        async with asyncio.timeout(30):
            assert await num_refused(running.port, most + 1000, expected=1000) == 1000
    finally:
        await running.stop(0)


async def test_a_server_does_not_receive_what_a_refused_call_sends(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, channel = server
    monkeypatch.setattr(call_rates, "CALL_BURST", 0)
    monkeypatch.setattr(call_rates, "CALLS_PER_S", 1e-6)
    part = pb.UploadPartRequest(data=bytes(limits.MAX_UNREAD_BYTES // 4))
    num_sent = 0

    async def parts() -> AsyncIterator[pb.UploadPartRequest]:
        nonlocal num_sent
        for _ in range(400):
            yield part
            num_sent += 1

    upload = registry_pb2_grpc.RegistryServiceStub(channel).UploadPart
    await _refusal(upload(parts(), metadata=_key("globex")))
    assert servicer.num_calls == 0
    assert 0 < num_sent < 8, "the window of a call takes four"


@pytest.mark.parametrize("method", ["GetAdapter", "UploadPart"])
async def test_compressed_messages_are_refused_before_they_are_unpacked(
    server: Any, method: str
) -> None:
    """Each KiB of a message may become a MiB, and its size is checked after that."""
    servicer, channel = server
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    call, request = stub.GetAdapter, pb.GetAdapterRequest(ref=100_000 * "a")
    if method == "UploadPart":
        call, request = stub.UploadPart, [pb.UploadPartRequest(data=bytes(100_000))]
    with pytest.raises(grpc.RpcError) as refused:
        await call(request, metadata=_key("globex"), compression=grpc.Compression.Gzip)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "'gzip' is disabled" in refused.value.details()
    assert servicer.num_calls == 0


@pytest.mark.parametrize("method", ["CreateUpload", "UploadPart", "WatchAdapters"])
async def test_refused_calls_do_not_count_as_open(
    server: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also before Python looks for cycles of garbage."""
    servicer, channel = server

    async def refuse(caller: Caller, num_calls: int) -> None:
        raise InvalidRequest("no")

    monkeypatch.setattr(call_rates.CallRates, "wait", staticmethod(refuse))
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    requests: dict[str, Any] = {
        "CreateUpload": pb.CreateUploadRequest(),
        "UploadPart": [pb.UploadPartRequest()],
        "WatchAdapters": pb.WatchAdaptersRequest(),
    }
    gc.disable()
    try:
        for _ in range(limits.MAX_STREAMS_PER_CONNECTION + 50):
            call = getattr(stub, method)(requests[method], metadata=_key("globex"))
            refusal = await _refusal(call.read() if method == "WatchAdapters" else call)
            assert type(refusal) is InvalidRequest, refusal
    finally:
        gc.enable()
    assert servicer.num_calls == 0


def test_counts_of_open_calls_do_not_outlive_the_calls() -> None:
    calls = OpenCalls()
    watch = f"/{NAME}/WatchAdapters"
    for tenant in ("acme", "globex"):
        with calls.counted(watch, Caller(tenant, "k", frozenset())):
            assert calls._counts
    with calls.counted(watch, LOCAL):
        assert not calls._counts


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, 1e300])
def test_number_that_is_not_finite_or_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest):
        limits.KEY_LIFETIME_S.check("ttl_s", value)


async def test_calls_of_a_tenant_beyond_its_rate_do_not_reach_the_server(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, channel = server
    monkeypatch.setattr(call_rates, "CALL_BURST", 10)
    monkeypatch.setattr(call_rates, "CALLS_PER_S", 1e-6)
    monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 0.0)
    create = registry_pb2_grpc.RegistryServiceStub(channel).CreateUpload
    request = pb.CreateUploadRequest()
    answers = await asyncio.gather(
        *(create(request, metadata=_key("globex")) for _ in range(50)), return_exceptions=True
    )
    refused = [from_rpc_error(a) for a in answers if isinstance(a, grpc.aio.AioRpcError)]
    assert {error.reason for error in refused} == {"TOO_MANY_CALLS"}
    assert (len(refused), servicer.num_calls) == (40, 10)
    await create(request, metadata=_key("acme"))
    await asyncio.gather(*(create(request, metadata=_key("gateway")) for _ in range(50)))
