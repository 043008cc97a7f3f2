"""Workers die, stall and drain; clients see one unbroken stream."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from loraplex.v1 import common_pb2
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import ScriptedWorker, endless

REPO = Path(__file__).parents[3]


async def _text(stack: Stack, model: str = "base", **fields: object) -> str:
    stream = await stack.openai().completions.create(
        **({"model": model, "prompt": "abc", "max_tokens": 64, "stream": True} | fields)
    )
    parts = [chunk.choices[0].text async for chunk in stream]
    return "".join(parts)


async def test_stream_goes_on_exactly_where_a_dead_worker_stopped(stack: Stack) -> None:
    """Also in the middle of a character and of a stop string."""
    dying = ScriptedWorker("w1", step_s=0.002)
    stack.workers = [ScriptedWorker("w0", step_s=0.002), dying]
    stack.registry.put("upper")
    await stack.start()
    undisturbed = await _text(stack, "upper")
    for limit in range(1, 24, 3):
        for worker in stack.workers:
            worker.requests.clear()
            worker.num_tokens_sent = 0
            worker.die_after_tokens = limit
        assert await _text(stack, "upper", stop=["never"]) == undisturbed
        placements = [r for worker in stack.workers for r in worker.requests]
        assert len(placements) >= 2
        assert len({r.sampling.seed for r in placements}) == 1
        assert any(r.output_ids for r in placements)
        await stack.until_ready(2)
    assert undisturbed.endswith("é€😀")


async def test_failed_attempt_before_the_first_token_is_repeated_on_another_worker(
    stack: Stack,
) -> None:
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1")]
    await stack.start()
    undisturbed = await _text(stack)
    away = common_pb2.ErrorDetail(code=14, reason="UNAVAILABLE", message="engine restarts")
    for worker in stack.workers:
        worker.requests.clear()
        worker.fail_next = [away]
    assert await _text(stack) == undisturbed
    assert sum(len(worker.requests) for worker in stack.workers) == 3


async def test_error_that_would_repeat_is_not_retried(stack: Stack) -> None:
    await stack.start()
    damaged = common_pb2.ErrorDetail(code=15, reason="DATA_LOSS", message="adapter is damaged")
    stack.workers[0].fail_next = [damaged]
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.openai().completions.create(model="base", prompt="x")
    assert caught.value.status_code == 502
    assert len(stack.workers[0].requests) == 1


async def test_worker_that_always_fails_is_given_up(stack: Stack) -> None:
    await stack.start()
    away = common_pb2.ErrorDetail(code=14, reason="UNAVAILABLE", message="engine restarts")
    stack.workers[0].fail_next = [away] * 20
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.openai().completions.create(model="base", prompt="x")
    assert caught.value.status_code == 503
    assert len(stack.workers[0].requests) < 10


async def test_no_ready_worker_is_unavailable_with_a_hint(stack: Stack) -> None:
    await stack.start()
    stack.workers[0].ready = False
    stack.workers[0].publish()
    await stack.until_ready(0)
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.openai().completions.create(model="base", prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_draining_worker_finishes_what_it_has_and_gets_nothing_new(stack: Stack) -> None:
    draining = ScriptedWorker("w0", script=endless, step_s=0.01)
    stack.workers = [draining]
    await stack.start()
    running = asyncio.create_task(_text(stack))
    await eventually(lambda: draining.num_live == 1)
    draining.draining = True
    draining.publish()
    await stack.until_ready(0)
    with pytest.raises(openai.InternalServerError):
        await _text(stack)
    assert len(await running) == 64
    assert len(draining.requests) == 1


async def test_client_that_leaves_frees_the_worker(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.01
    await stack.start()
    stream = await stack.openai().completions.create(
        model="base", prompt="x", max_tokens=400, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)
    await eventually(lambda: stack.workers[0].num_live == 0)


async def test_client_that_leaves_while_it_waits_for_a_whole_answer_frees_the_worker(
    stack: Stack,
) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.01
    await stack.start()
    with pytest.raises(openai.APITimeoutError):
        await stack.openai().completions.create(
            model="base", prompt="x", max_tokens=400, timeout=0.3
        )
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)
    await eventually(lambda: stack.workers[0].num_live == 0)


async def test_request_ends_at_its_deadline(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.05
    stack.max_request_s = 0.4
    await stack.start()
    with pytest.raises(openai.APIStatusError) as caught:
        await stack.openai().completions.create(model="base", prompt="x", max_tokens=400)
    assert caught.value.status_code == 504
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)
    await eventually(lambda: stack.workers[0].num_live == 0)


@pytest.fixture
async def processes(stack: Stack) -> AsyncIterator[dict[str, subprocess.Popen[bytes]]]:
    """Two workers as processes of their own, slow enough to be killed in the middle."""
    running = {name: _started(stack, name) for name in ("w0", "w1")}
    yield running
    for process in running.values():
        process.kill()
        process.wait()


def _started(stack: Stack, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.gateway.scripted_worker", "--step-s", "0.02"]
    command += ["--listen", stack.worker_address(name), "--worker-id", name]
    return subprocess.Popen(command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)})


@pytest.mark.e2e
async def test_killed_processes_are_hidden_from_many_streams(
    stack: Stack, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    stack.workers = []
    stack.registry.put("upper")
    await stack.start(others=("w0", "w1"))
    prompts = [f"prompt {number}" for number in range(12)]
    expected = [await _text(stack, "upper", prompt=prompt, temperature=1) for prompt in prompts]
    for victim in ("w0", "w1"):
        streams = [
            asyncio.create_task(_text(stack, "upper", prompt=prompt, temperature=1))
            for prompt in prompts
        ]
        await asyncio.sleep(0.25)
        processes[victim].send_signal(signal.SIGKILL)
        processes[victim].wait()
        processes[victim] = _started(stack, victim)
        assert await asyncio.gather(*streams) == expected
        await stack.until_ready(2)
