"""The blocking clients do what the async ones do, also inside a running event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from loraplex.client.blocking import THREAD_NAME, BlockingInference, BlockingRegistry
from loraplex.client.settings import Credentials
from loraplex.errors import InvalidRequest, Unavailable
from loraplex.v1 import common_pb2
from loraplex.v1 import inference_pb2 as pb
from tests.sdk.servers import ScriptedGateway, serving

RESPONSES = [
    pb.GenerateResponse(text="A"),
    pb.GenerateResponse(text="B", finish_reason=common_pb2.FINISH_REASON_STOP),
]


@pytest.fixture
def address() -> Iterator[str]:
    """A gateway on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def addresses() -> AsyncGenerator[str]:
        async with serving(ScriptedGateway(RESPONSES)) as found:
            yield found

    source = addresses()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    yield run(anext(source))
    run(source.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_completes_and_streams(address: str) -> None:
    with BlockingInference(address, Credentials()) as client:
        assert client.complete("upper", "x").text == "AB"
        assert [chunk.text for chunk in client.generate("upper", "x")] == ["A", "B"]
        assert [model.id for model in client.models()] == ["m0", "m1", "m2"]


def test_leaving_a_stream_early_closes_it(address: str) -> None:
    with BlockingInference(address, Credentials()) as client:
        stream = client.generate("upper", "x")
        assert next(stream).text == "A"
        stream.close()  # type: ignore[attr-defined]
        assert client.complete("upper", "x").text == "AB"


async def test_works_inside_a_running_loop(address: str) -> None:
    with BlockingInference(address, Credentials()) as client:
        assert client.complete("upper", "x").text == "AB"


def test_errors_are_the_same() -> None:
    with BlockingRegistry("127.0.0.1:1", Credentials()) as client, pytest.raises(Unavailable):
        client.get("upper")


def num_threads() -> int:
    """Number of threads of blocking clients."""
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_clients_share_one_thread_that_ends_with_the_last_of_them(address: str) -> None:
    """With a thread for each, grpcio logs errors when two of their event loops wake up at once."""
    first, second = BlockingInference(address, Credentials()), BlockingInference(address)
    third = BlockingRegistry(address, Credentials())
    assert num_threads() == 1
    first.close()
    first.close()
    third.close()
    assert second.complete("upper", "x").text == "AB"
    second.close()
    assert num_threads() == 0
    with BlockingInference(address, Credentials()) as later:
        assert later.complete("upper", "x").text == "AB"


def test_a_client_that_cannot_be_made_leaves_no_thread() -> None:
    with pytest.raises(InvalidRequest):
        BlockingInference("no-port", Credentials())
    assert num_threads() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_makes_clients_of_its_own() -> None:
    """Such as a worker of a data loader. The thread of the parent does not exist there."""
    program = (
        "import os, sys\n"
        "from loraplex import BlockingRegistry, Credentials\n"
        "parent = BlockingRegistry('127.0.0.1:1', Credentials())\n"
        "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "BlockingRegistry('127.0.0.1:1', Credentials()).close()\n"
        "os._exit(7)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 7
