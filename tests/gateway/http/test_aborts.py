"""Requests that their tenant ends by id."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.live import NUM_TOKENS, policy_body, post

GENERATE = "/inference/v1/generate"


def start(stack: Stack, request_id: str, **fields: Any) -> asyncio.Task[httpx.Response]:
    params = {"max_tokens": NUM_TOKENS, **fields}
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": params}
    return asyncio.create_task(post(stack, GENERATE, {**body, "request_id": request_id}))


async def abort(stack: Stack, *request_ids: str) -> Any:
    body = {"request_ids": list(request_ids)}
    return (await post(stack, "/inference/v1/abort_requests", body)).json()


async def test_requests_end_with_what_was_generated_and_others_go_on(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running, other = start(live, "r-1", n=2), start(live, "r-2")
    await eventually(lambda: live.workers[0].num_live == 3)
    assert await abort(live, "r-1", "never-sent") == {"status": "aborted", "aborted": 1}
    for choice in (await running).json()["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) < NUM_TOKENS
    live.workers[0].stands_at = None
    assert len((await other).json()["choices"][0]["token_ids"]) == NUM_TOKENS


async def test_a_stream_ends_and_is_named_by_its_header(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=30.0) as client,
        client.stream("POST", "/v1/completions", json=policy_body(stream=True)) as answer,
    ):
        await abort(live, answer.headers["x-request-id"])
        lines = [line async for line in answer.aiter_lines() if line]
    assert '"finish_reason":"abort"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


async def test_requests_that_wait_for_the_end_of_a_pause_end_too(live: Stack) -> None:
    await post(live, "/pause", mode="keep")
    waiting = start(live, "r-1")
    await eventually(lambda: bool(live.running._live._held_up))
    assert (await abort(live, "r-1"))["aborted"] == 1
    (choice,) = (await waiting).json()["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_completions_and_chats_take_the_id_from_their_body(live: Stack, path: str) -> None:
    body = policy_body(request_id="r-1")
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "hi"}]
        del body["prompt"]
    live.workers[0].stands_at = NUM_TOKENS // 2
    running = asyncio.create_task(post(live, path, body))
    await eventually(lambda: live.workers[0].num_live == 1)
    assert (await abort(live, "r-1"))["aborted"] == 1
    answer = (await running).json()
    assert answer["id"].endswith("cmpl-r-1")
    assert answer["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("body", [{}, {"request_ids": []}, {"request_ids": [1]}, {"rid": "r"}])
async def test_bodies_that_name_no_request_are_refused(stack: Stack, body: dict[str, Any]) -> None:
    await stack.start()
    answer = await post(stack, "/abort_requests", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(body), "request_ids")


async def test_requests_of_other_tenants_go_on(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running = start(live, "r-1")
    await eventually(lambda: live.workers[0].num_live == 1)
    assert live.running._live.abort("rival", {"r-1"}) == 0
    live.workers[0].stands_at = None
    assert (await running).json()["choices"][0]["finish_reason"] == "length"
