"""Operators ask the gateway for more than its status."""

from __future__ import annotations

import pytest

from loraplex.client.divergence import served_quantization
from loraplex.client.inference_client import InferenceClient
from loraplex.errors import AdapterNotFound, Blocked, InvalidRequest, Unavailable
from tests.gateway.conftest import Stack
from tests.gateway.scripted_worker import ScriptedWorker


@pytest.fixture
def stack(stack: Stack) -> Stack:
    """Three workers."""
    stack.workers = [ScriptedWorker(f"w{n}") for n in range(3)]
    return stack


async def test_a_fetched_adapter_waits_where_its_requests_go(stack: Stack) -> None:
    stack.registry.put("sql")
    await stack.start()
    async with InferenceClient(stack.grpc_address) as client:
        fetched = await client.fetch("sql")
        assert fetched.ref == "default/sql:v1"
        await client.complete("sql", "x")
        everywhere = await client.fetch("sql", 99)
    (home,) = [worker for worker in stack.workers if worker.requests]
    assert fetched.worker_ids == (home.worker_id,)
    assert everywhere.worker_ids[0] == home.worker_id
    assert sorted(everywhere.worker_ids) == ["w0", "w1", "w2"]


async def test_what_cannot_be_fetched_says_why(stack: Stack) -> None:
    stack.registry.put("sql")
    await stack.start()
    async with InferenceClient(stack.grpc_address) as client:
        with pytest.raises(InvalidRequest, match="is a base"):
            await client.fetch("base")
        with pytest.raises(AdapterNotFound):
            await client.fetch("nosuch")
        for worker in stack.workers:
            await stack.stop_server(worker.worker_id)
        with pytest.raises(Unavailable):
            await client.fetch("sql")


async def test_a_certificate_says_how_all_workers_of_its_base_quantised_it(stack: Stack) -> None:
    for worker in stack.workers:
        worker.quantization = "int8"
    stack.workers[2].base_id, stack.workers[2].quantization = "other", "int4"
    await stack.start()
    async with InferenceClient(stack.grpc_address) as client:
        assert await served_quantization(client, "base") == "int8"
        assert await served_quantization(client, "other") == "int4"


async def test_workers_that_quantised_a_base_differently_are_not_certified(stack: Stack) -> None:
    stack.workers[1].quantization = "int4"
    await stack.start()
    async with InferenceClient(stack.grpc_address) as client:
        with pytest.raises(Blocked, match=r"--kv-cache-dtype \(int4, none\)"):
            await served_quantization(client, "base")
