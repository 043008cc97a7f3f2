"""Adapters that are loaded, pinned and unloaded ahead of requests, on a worker from the outside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from loraplex.v1 import worker_pb2
from tests.worker.worker_process import (
    PATIENCE_S,
    WorkerProcess,
    publish_adapters,
    until_status,
    worker_folder,
)

pytestmark = pytest.mark.e2e

MISSING = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with worker_folder() as worker:
        asyncio.run(publish_adapters(worker, ["two", "three", "four"]))
        worker.start(LORAPLEX_DEBUG="overlap=on")
        yield worker


async def test_adapters_are_loaded_pinned_and_unloaded_on_request(worker: WorkerProcess) -> None:
    digest = worker.digests["four"]
    async with worker.connected() as stub:
        loaded = await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(digest=digest, pin=True))
        assert loaded.residency.tier == worker_pb2.ADAPTER_TIER_DEVICE
        assert loaded.residency.pinned and loaded.residency.device_bytes > 0
        await stub.PinAdapter(worker_pb2.PinAdapterRequest(digest=digest, pinned=False))
        await stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(digest=digest))
        status = await until_status(
            stub,
            lambda message: any(
                a.digest == digest and a.tier == worker_pb2.ADAPTER_TIER_DISK
                for a in message.adapters
            ),
        )
        assert status.worker_id and status.base_id == "base"
        with pytest.raises(grpc.RpcError) as caught:
            await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(digest=MISSING))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_load_may_return_before_the_engine_has_the_adapter(worker: WorkerProcess) -> None:
    first, digest = worker.digests["four"], worker.digests["three"]
    load = worker_pb2.LoadAdapterRequest(digest=digest, when_fetched=True)
    async with worker.connected() as stub:
        await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(digest=first))
        engine = worker.engine()
        engine.suspend()
        try:
            early = await asyncio.wait_for(stub.LoadAdapter(load), PATIENCE_S)
        finally:
            engine.resume()
        assert early.residency.tier == worker_pb2.ADAPTER_TIER_LOADING
        whole = await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(digest=digest))
        assert whole.residency.tier == worker_pb2.ADAPTER_TIER_DEVICE


async def test_a_load_that_an_unload_overtakes_ends_with_the_reason(worker: WorkerProcess) -> None:
    digest = worker.digests["three"]
    load = worker_pb2.LoadAdapterRequest(digest=digest, pin=True)
    unload = worker_pb2.UnloadAdapterRequest(digest=digest)
    async with worker.connected() as stub:
        await stub.LoadAdapter(load)  # from then on it is on disk
        await stub.UnloadAdapter(unload)
        engine = worker.engine()
        engine.suspend()
        try:
            loading = asyncio.ensure_future(stub.LoadAdapter(load))
            await until_status(stub, lambda message: message.full)
            await stub.UnloadAdapter(unload)
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.wait_for(loading, PATIENCE_S)
        finally:
            engine.resume()
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert (await stub.LoadAdapter(load)).residency.pinned
        await stub.UnloadAdapter(unload)


async def test_pinned_adapters_come_back_with_a_new_engine(worker: WorkerProcess) -> None:
    digest = worker.digests["two"]
    async with worker.connected() as stub:
        await stub.LoadAdapter(worker_pb2.LoadAdapterRequest(digest=digest, pin=True))
        epoch = (await until_status(stub, lambda message: message.full)).epoch
        worker.engine().kill()
        status = await until_status(
            stub,
            lambda message: (
                message.epoch != epoch
                and any(
                    a.digest == digest and a.tier == worker_pb2.ADAPTER_TIER_DEVICE
                    for a in message.adapters
                )
            ),
        )
        [entry] = [a for a in status.adapters if a.digest == digest]
        assert entry.pinned
        await stub.PinAdapter(worker_pb2.PinAdapterRequest(digest=digest, pinned=False))


async def test_a_pin_outlives_an_engine_that_ends_while_it_is_asked_for_again(
    worker: WorkerProcess,
) -> None:
    digest = worker.digests["two"]
    pin = worker_pb2.LoadAdapterRequest(digest=digest, pin=True)

    def pinned(message: worker_pb2.WatchStatusResponse) -> bool:
        return any(a.digest == digest and a.pinned for a in message.adapters)

    async with worker.connected() as stub:
        await stub.LoadAdapter(pin)
        epoch = (await until_status(stub, lambda message: message.full)).epoch
        engine = worker.engine()
        engine.suspend()
        again = asyncio.ensure_future(stub.LoadAdapter(pin))
        await until_status(stub, lambda message: message.full)
        engine.kill()
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(again, PATIENCE_S)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await until_status(stub, lambda message: message.epoch != epoch and pinned(message))
        await stub.PinAdapter(worker_pb2.PinAdapterRequest(digest=digest, pinned=False))
