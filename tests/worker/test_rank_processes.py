"""A worker of two tensor-parallel ranks from the outside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import psutil
import pytest

from tests.processes import processes_running
from tests.worker.worker_process import (
    PATIENCE_S,
    SessionCall,
    WorkerProcess,
    publish_adapters,
    request,
    worker_folder,
)

pytestmark = pytest.mark.e2e

RANK_MODULE = "loraplex_services.worker.runner.parallel.rank_process"


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with worker_folder() as worker:
        asyncio.run(publish_adapters(worker, ["one", "two", "three"]))
        worker.start(LORAPLEX_TENSOR_PARALLEL="2")
        yield worker


def other_rank(worker: WorkerProcess) -> psutil.Process:
    [rank] = processes_running(worker.engine().pid, RANK_MODULE)
    return rank


async def tokens_of(worker: WorkerProcess) -> dict[str, list[int]]:
    """Greedy and sampled, of the base and of each adapter."""
    digests = {"base": (), **{name: (digest,) for name, digest in worker.digests.items()}}
    async with worker.connected() as stub:
        session = await SessionCall(stub, worker.token).open()
        for name, own in digests.items():
            await session.submit(
                request(f"{name}-greedy", *own, max_tokens=24),
                request(f"{name}-sampled", *own, max_tokens=24, temperature=0.9, top_p=0.9),
            )
        await session.until_ended(*(f"{n}-{s}" for n in digests for s in ("greedy", "sampled")))
        session.close()
        assert not session.errors
        return session.tokens


@pytest.mark.long
async def test_two_ranks_stream_the_tokens_of_one(worker: WorkerProcess) -> None:
    found = await tokens_of(worker)
    with worker_folder() as alone:
        await publish_adapters(alone, list(worker.digests))
        alone.start()
        assert await tokens_of(alone) == found


async def test_a_killed_rank_ends_the_streams_and_the_group_is_replaced(
    worker: WorkerProcess,
) -> None:
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("long", max_tokens=250))
        await session.step()
        engine, rank = worker.engine(), other_rank(worker)
        rank.kill()
        with pytest.raises(grpc.RpcError) as caught:
            await session.until_ended("long")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    engine.wait(PATIENCE_S)
    assert len((await tokens_of(worker))["one-greedy"]) == 24
    assert worker.engine().pid != engine.pid


async def test_a_killed_engine_process_takes_its_ranks_along(worker: WorkerProcess) -> None:
    async with worker.connected():
        rank = other_rank(worker)
        worker.engine().kill()
    rank.wait(PATIENCE_S)
    assert len((await tokens_of(worker))["base-greedy"]) == 24
