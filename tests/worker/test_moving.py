"""A worker that finds no compiled kernels: it serves by torch, builds them and moves over."""

from __future__ import annotations

import asyncio
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.v1 import worker_pb2, worker_pb2_grpc
from services.worker.native.build import SOURCE_DIR, build_library
from services.worker.native.isa import TORCH, choose_isa
from tests.worker.kernels.native_isas import native
from tests.worker.worker_process import (
    SessionCall,
    WorkerProcess,
    publish_adapters,
    request,
    until_status,
    worker_folder,
)

Request = worker_pb2.WorkerRequest
pytestmark = pytest.mark.e2e

ISA = choose_isa("auto")
NAMES = ("base", "one", "two", "three")
NUM_KINDS = 2 * len(NAMES)
ANSWERS_AFTER = 8
"""Of the new engine, before a test has seen enough."""


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """In an environment without a library."""
    if ISA == TORCH:
        pytest.skip("nothing to build on this processor")
    native(ISA)  # skips without a compiler
    with worker_folder() as worker:
        venv.create(worker.root / "venv", symlinks=True)
        worker.python = str(worker.root / "venv/bin/python")
        asyncio.run(publish_adapters(worker, NAMES[1:]))
        yield worker


def start(worker: WorkerProcess, **changes: str) -> None:
    places = {
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "XDG_CACHE_HOME": str(worker.root / "xdg"),
    }
    worker.start(**places, **changes)


def compiler_cache(worker: WorkerProcess) -> Path:
    """A compiler that has seen it all, and links once the test says so."""
    script = worker.root / "cached-c++"
    script.write_text(
        "#!/bin/sh\n"
        "for target; do :; done\n"  # the last argument
        'case " $* " in\n'
        '*" -shared "*)\n'
        f'    until [ -e "{worker.root}/go" ]; do sleep 0.02; done\n'
        f'    cp "{build_library(ISA)}" "$target" ;;\n'
        '*" -c "*) : >"$target" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)
    return script


def ask(worker: WorkerProcess, request_id: str, kind: int, max_tokens: int) -> Request:
    """One of eight different requests: the base or an adapter, greedy or drawn."""
    name = NAMES[kind % len(NAMES)]
    digests = [worker.digests[name]] if name in worker.digests else []
    temperature = 0.8 if kind >= len(NAMES) else 0.0
    return request(request_id, *digests, temperature=temperature, max_tokens=max_tokens)


async def watch_epochs(stub: worker_pb2_grpc.WorkerServiceStub, seen: list[int]) -> None:
    async for message in stub.WatchStatus(worker_pb2.WatchStatusRequest()):
        assert message.ready
        if message.epoch not in seen:
            seen.append(message.epoch)


async def keep_asking(
    worker: WorkerProcess, session: SessionCall, epochs: list[int], width: int, max_tokens: int
) -> list[str]:
    """Keep `width` requests running until another engine has answered some; their ids, in order."""
    asked: list[str] = []
    running: set[str] = set()
    num_after = 0
    while running or num_after < ANSWERS_AFTER:
        while len(running) < width and num_after < ANSWERS_AFTER:
            asked.append(str(len(asked)))
            running.add(asked[-1])
            await session.submit(ask(worker, asked[-1], (len(asked) - 1) % NUM_KINDS, max_tokens))
        await session.step()
        ended = running & {*session.finished, *session.errors}
        running -= ended
        num_after += len(ended) * (len(epochs) > 1)
    return asked


async def move(worker: WorkerProcess, width: int, max_tokens: int) -> None:
    """See that whatever is asked before, meanwhile and after is answered alike."""
    async with worker.connected() as stub:
        await stub.LoadAdapter(
            worker_pb2.LoadAdapterRequest(digest=worker.digests["one"], pin=True)
        )
        by_torch = await stub.GetModel(worker_pb2.GetModelRequest())
        epochs: list[int] = []
        watch = asyncio.create_task(watch_epochs(stub, epochs))
        session = await SessionCall(stub).open()
        first = [f"first-{kind}" for kind in range(NUM_KINDS)]
        for kind, request_id in enumerate(first):
            await session.submit(ask(worker, request_id, kind, max_tokens))
        await session.until_ended(*first)
        assert await stub.GetModel(worker_pb2.GetModelRequest()) == by_torch
        (worker.root / "go").touch()
        asked = await keep_asking(worker, session, epochs, width, max_tokens)
        watch.cancel()
        assert session.errors == {}
        expected = [session.tokens[request_id] for request_id in first]
        assert len(set(map(tuple, expected))) == NUM_KINDS
        for number, request_id in enumerate(asked):
            assert session.tokens[request_id] == expected[number % NUM_KINDS], request_id
        by_kernels = await stub.GetModel(worker_pb2.GetModelRequest())
        assert by_kernels.numerics_fingerprint != by_torch.numerics_fingerprint
        status = await until_status(stub, lambda message: message.full)
        [pinned] = [a for a in status.adapters if a.digest == worker.digests["one"]]
        assert pinned.pinned and pinned.tier == worker_pb2.ADAPTER_TIER_DEVICE
        session.close()


def log_of(worker: WorkerProcess) -> list[str]:
    """What it told, from the word that counts on."""
    code, log = worker.stop()
    assert code == 0, log
    told = ("cpu kernels: ", "native kernels: ", "moving to ")
    return [line[line.index(t) :] for line in log.splitlines() for t in told if t in line]


async def test_it_serves_by_torch_and_moves_to_what_a_compiler_made(worker: WorkerProcess) -> None:
    start(worker, CXX=str(compiler_cache(worker)))
    await move(worker, width=1, max_tokens=8)
    log = await asyncio.to_thread(log_of, worker)
    assert f"cpu kernels: torch, until those for {ISA} are compiled" in log
    num_sources = len(list(SOURCE_DIR.glob("*.cpp")))
    for number in range(1, num_sources + 1):
        assert any(
            line.startswith(f"native kernels: {ISA}: compiled ")
            and line.endswith(f", {number} of {num_sources}")
            for line in log
        )
    assert log[-1] == f"cpu kernels: {ISA}"


@pytest.mark.long
async def test_what_never_pauses_goes_on_in_the_new_engine(worker: WorkerProcess) -> None:
    start(worker)
    await move(worker, width=3, max_tokens=200)
    log = await asyncio.to_thread(log_of, worker)
    assert "moving to compiled kernels num_running=3" in log
    assert log[-1] == f"cpu kernels: {ISA}"


async def test_where_nothing_can_be_compiled_torch_goes_on(worker: WorkerProcess) -> None:
    start(worker, CXX="/bin/false", PATH="/nowhere")
    async with worker.connected() as stub:
        session = await SessionCall(stub).open()
        await session.submit(request("r"))
        await session.until_ended("r")
        assert len(session.tokens["r"]) == 8
        session.close()
