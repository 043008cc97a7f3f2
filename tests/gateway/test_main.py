"""The process: starts, says what is wrong, drains."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from loraplex.errors import AlreadyExists
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.readiness import Readiness
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import start_registry
from tests.gateway.scripted_worker import endless
from tests.servers import free_port

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e


def _start(stack: Stack, http_listen: str) -> subprocess.Popen[str]:
    settings = {
        "LORAPLEX_WORKERS": stack.worker_address("w0"),
        "LORAPLEX_REGISTRY_ADDRESS": stack.registry_address,
        "LORAPLEX_GATEWAY_LISTEN": f"unix:{stack.folder}/gateway.sock",
        "LORAPLEX_HTTP_LISTEN": http_listen,
        "LORAPLEX_DRAIN_S": "10",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "loraplex_services.gateway"],
        cwd=REPO,
        env=os.environ | settings,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
async def neighbours(stack: Stack) -> AsyncIterator[Stack]:
    """Worker and registry without a gateway."""
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    stack.servers["registry"] = await start_registry(stack.registry, stack.registry_address)
    await stack.start_worker(stack.workers[0])
    yield stack


async def test_sigterm_lets_running_streams_end(neighbours: Stack) -> None:
    port = free_port()
    process = _start(neighbours, f"127.0.0.1:{port}")
    try:
        await eventually(lambda: bool(neighbours.registry.bases) and _answers(port))
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=20
        ) as client:
            stream = await client.completions.create(
                model="base", prompt="x", max_tokens=60, stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text
                if len(text) == 3:
                    process.send_signal(signal.SIGTERM)
        assert len(text) == 60
        assert await asyncio.to_thread(process.wait, 15) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def test_taken_port_ends_the_start_naming_port_and_setting(neighbours: Stack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        process = _start(neighbours, listen)
        _, errors = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 2
    assert "LORAPLEX_HTTP_LISTEN" in errors
    assert listen in errors


async def test_base_whose_id_is_taken_ends_the_start_with_the_way_out(neighbours: Stack) -> None:
    neighbours.registry.refuses_bases = AlreadyExists("'base' is the name of an adapter")
    process = _start(neighbours, "127.0.0.1:0")
    _, errors = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 4
    assert "refuses base 'base': 'base' is the name of an adapter" in errors
    assert "(LORAPLEX_SERVED_MODEL_NAME of the worker)" in errors


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_gateway_of_which_a_part_fails_gives_up(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor restarts it; one without its workers would wait without end and say nothing."""

    async def fail(self: Fleet) -> None:
        raise RuntimeError("the fleet failed")

    monkeypatch.setattr(Fleet, "run", fail)
    await stack.start(ready=False)
    await eventually(lambda: "the fleet failed" in str(stack.running.error))


def test_readiness_latches_when_it_is_first_seen() -> None:
    missing = ["", "waiting for the first ready worker"]
    readiness = Readiness(lambda: missing.pop(0))
    assert readiness.missing() == ""
    assert readiness.missing() == "", "the worker left before the next poll"
    readiness.end()
    assert readiness.missing() == "draining"
