"""The blocking clients do what the async ones do, also inside a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from loraplex.client.blocking import BlockingInference, BlockingRegistry
from loraplex.client.settings import Credentials
from loraplex.errors import Unavailable
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
