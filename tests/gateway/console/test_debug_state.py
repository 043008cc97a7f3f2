"""What /debug/state of a gateway shows."""

from __future__ import annotations

import asyncio
import json

from loraplex_services.gateway.console import debug_state
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import endless

TEXT = "a sentence of a user"


async def test_it_shows_workers_the_queue_and_running_requests_without_their_text(
    stack: Stack,
) -> None:
    [worker] = stack.workers
    worker.script, worker.stands_at = endless, 2
    await stack.start()
    body = {"model": "base", "prompt": TEXT, "max_tokens": 8}
    asking = asyncio.create_task(stack.openai().completions.create(**body))
    await eventually(lambda: worker.num_tokens_sent == 2)

    def read_both() -> bool:
        [request] = stack.running.debug_state()["oldest_requests"]
        return bool(request["num_output_tokens"] == 2)

    await eventually(read_both)
    text = json.dumps(stack.running.debug_state(), allow_nan=False)
    state = json.loads(text)
    assert TEXT not in text
    assert state["not_ready_reason"] == "" and state["registry"]["is_watching"]
    assert state["admission"]["tenants"] == [
        {"tenant": "default", "num_running": 1, "num_waiting": 0}
    ]
    [shown] = state["workers"]
    assert shown["takes_requests"] and shown["in_flight"] == 1
    [request] = state["oldest_requests"]
    assert request["workers"] == [shown["address"]] and request["base"] == "base"
    assert request["num_prompt_tokens"] == len(TEXT) + 1, "with the token that begins a text"
    worker.stands_at = None
    await asking
    assert stack.running.debug_state()["num_requests"] == 0


async def test_a_lost_worker_is_shown_as_such(stack: Stack) -> None:
    await stack.start()
    await stack.stop_server("w0")
    await eventually(lambda: not stack.running.debug_state()["workers"][0]["takes_requests"])
    assert stack.running.debug_state()["num_workers"] == 1


async def test_lists_are_bounded_and_numbers_are_not(stack: Stack) -> None:
    stack.workers[0].script, stack.workers[0].stands_at = endless, 1
    await stack.start()
    num = debug_state.MAX_LISTED + 5
    body = {"model": "base", "prompt": [256, 97], "max_tokens": 2}
    requests = [asyncio.create_task(stack.openai().completions.create(**body)) for _ in range(num)]
    await eventually(lambda: stack.running.debug_state()["num_requests"] == num)
    state = stack.running.debug_state()
    assert len(state["oldest_requests"]) == debug_state.MAX_LISTED
    stack.workers[0].stands_at = None
    await asyncio.gather(*requests)
