"""Pauses of a gateway, or of one adapter."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.live import (
    NUM_TOKENS,
    check_labels,
    policy_body,
    post,
    start,
    until_known,
    until_running,
)
from tests.gateway.scripted_registry import digest_of
from tests.gateway.scripted_worker import ScriptedWorker


async def test_keep_freezes_running_requests_and_lets_them_go_on(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running, other = start(live), start(live, model="other")
    await eventually(lambda: live.workers[0].num_live == 2)
    assert (await post(live, "/pause", mode="keep", model="Policy")).json() == {"status": "paused"}
    await eventually(lambda: live.workers[0].num_live == 1)
    late = start(live, max_tokens=3)
    live.workers[0].stands_at = None
    assert len((await other).json()["choices"][0]["token_ids"]) == NUM_TOKENS
    assert live.workers[0].num_live == 0
    assert not running.done()
    assert not late.done()
    live.registry.put("policy", 2)
    assert (await post(live, "/resume", model="policy")).json() == {"status": "resumed"}
    choice = (await running).json()["choices"][0]
    assert check_labels(choice) == [1]
    assert len(choice["token_ids"]) == NUM_TOKENS
    assert len((await late).json()["choices"][0]["token_ids"]) == 3


async def test_a_follower_goes_on_with_what_was_published_during_a_pause(live: Stack) -> None:
    running = start(live, on_update="follow_keep_prefix")
    await until_running(live)
    await post(live, "/pause", mode="keep", clear_cache="false")
    live.registry.put("policy", 2)
    await until_known(live, 2)
    await asyncio.sleep(0.05)
    await post(live, "/resume")
    choice = (await running).json()["choices"][0]
    assert check_labels(choice) == [1, 2]
    assert len(choice["token_ids"]) == NUM_TOKENS


async def test_a_follower_that_came_during_a_pause_takes_what_was_published_in_it(
    live: Stack,
) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 2
    assert (await post(live, "/pause", mode="keep", model="policy")).status_code == 200
    waiting = start(live, on_update="follow")
    await eventually(lambda: bool(live.running._live._held_up))
    live.registry.put("policy", 2)
    await until_known(live, 2)
    assert (await post(live, "/resume", model="policy")).status_code == 200
    # It may have begun with the version before.
    await eventually(
        lambda: any(each.adapters[0].digest == digest_of("policy", 2) for each in worker.requests)
    )
    worker.stands_at = None
    assert check_labels((await waiting).json()["choices"][0])[-1] == 2


async def test_a_client_that_does_not_read_delays_no_pause(live: Stack) -> None:
    body = policy_body(stream=True, max_tokens=400)
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=30.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        await until_running(live)
        for mode in ("keep", "abort"):
            assert (await post(live, "/pause", mode=mode)).status_code == 200
            await eventually(lambda: live.workers[0].num_live == 0)


async def test_abort_answers_with_what_was_generated(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running, chat = start(live, n=2), start(live, model="other")
    await eventually(lambda: live.workers[0].num_live == 3)
    assert (await post(live, "/pause")).status_code == 200
    for answer in (await running, await chat):
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "abort"
            assert len(choice["token_ids"]) < NUM_TOKENS
    await eventually(lambda: live.workers[0].num_live == 0)
    async with httpx.AsyncClient(base_url=live.url) as client:
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        await client.post("/resume")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
    live.workers[0].stands_at = None
    assert (await start(live, max_tokens=2)).json()["choices"][0]["finish_reason"] == "length"


async def test_wait_lets_running_requests_end(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running = start(live)
    await until_running(live)
    pausing = asyncio.create_task(post(live, "/pause", mode="wait"))
    async with httpx.AsyncClient(base_url=live.url) as client:
        while not (await client.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0.01)
    late = start(live, max_tokens=2)
    live.workers[0].stands_at = None
    assert len((await running).json()["choices"][0]["token_ids"]) == NUM_TOKENS
    assert (await pausing).status_code == 200
    assert not late.done()
    await post(live, "/resume")
    assert (await late).json()["choices"][0]["finish_reason"] == "length"


async def test_both_pauses_must_end(live: Stack) -> None:
    for model in ("", "policy"):
        await post(live, "/pause", mode="wait", model=model)
    waiting = start(live, max_tokens=2)
    await post(live, "/resume")
    assert (await start(live, model="other", max_tokens=2)).status_code == 200
    assert not waiting.done()
    await post(live, "/resume", model="policy")
    assert (await waiting).status_code == 200


async def test_a_deadline_passes_during_a_pause_too(live: Stack) -> None:
    await post(live, "/pause")
    live.running._generation._max_request_s = 0.2
    assert (await start(live)).status_code == 504


@pytest.mark.parametrize("selector", [":v1", ":prod", "@sha256:12"])
@pytest.mark.parametrize("path", ["/pause", "/resume"])
async def test_a_pause_of_one_version_is_refused_with_the_name_to_use(
    live: Stack, path: str, selector: str
) -> None:
    answer = await post(live, path, model=f"policy{selector}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert "all versions" in error["message"]
    assert error["message"].endswith("try 'policy'")


async def test_the_only_base_means_all_models(live: Stack) -> None:
    async def is_paused(**query: str) -> bool:
        async with httpx.AsyncClient(base_url=live.url) as client:
            return bool((await client.get("/is_paused", params=query)).json()["is_paused"])

    assert (await post(live, "/pause", model="base")).status_code == 200
    assert await is_paused() and await is_paused(model="base") and await is_paused(model="policy")
    assert (await post(live, "/resume", model="policy")).status_code == 200
    assert await is_paused(model="policy")
    assert (await post(live, "/resume", model="base")).status_code == 200
    assert not await is_paused()
    await post(live, "/pause", model="policy")
    assert await is_paused(model="policy") and not await is_paused(model="base")


@pytest.mark.parametrize("path", ["/pause", "/resume"])
async def test_a_pause_of_one_of_several_bases_is_refused_because_it_would_pause_nothing(
    stack: Stack, path: str
) -> None:
    stack.workers.append(ScriptedWorker("w1", base_id="second"))
    await stack.start()
    answer = await post(stack, path, model="second")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert "leave model out" in error["message"]
