"""What the prompts of waiting and running requests may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx2 as httpx
import pytest

from loraplex.errors import ResourceExhausted
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.pipeline import held_prompts, live
from loraplex_services.gateway.pipeline.held_prompts import HeldPrompts
from tests.gateway.conftest import Stack, eventually

pytestmark = pytest.mark.hostile
KEY = "lpx_acmeadm1_" + "a" * 43


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_prompts, "MAX_HELD_TOKENS", 10)
    monkeypatch.setattr(held_prompts, "MAX_HELD_TOKENS_PER_TENANT", 8)


def test_prompts_of_one_tenant_hold_so_much_together_and_give_it_back() -> None:
    held = HeldPrompts()
    for _ in range(3):
        with held.counted("acme", 4), held.counted("acme", 4):
            with pytest.raises(ResourceExhausted, match="fewer at a time"), held.counted("acme", 1):
                pass
    with held.counted("acme", 100):  # alone, one prompt is never too large
        pass


def test_when_all_is_taken_whoever_holds_more_than_an_equal_share_is_refused() -> None:
    held = HeldPrompts()
    with held.counted("acme", 7), held.counted("globex", 3):
        with pytest.raises(ResourceExhausted), held.counted("acme", 1):
            pass
        with held.counted("globex", 1):
            pass


@asynccontextmanager
async def paused(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client with an admin's key, and `policy` paused."""
    stack.wants_keys = True
    stack.registry.keys[KEY] = registry_pb2.Key(key_id="a", tenant="acme", scopes=["admin"])
    stack.registry.put("policy", 1, tenant="acme")
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=30.0, headers=headers) as client:
        assert (await client.post("/pause", params={"model": "policy"})).status_code == 200
        yield client


async def test_prompts_that_wait_for_the_end_of_a_pause_count(stack: Stack) -> None:
    body = {"model": "policy", "prompt": [1, 2, 3, 4], "max_tokens": 1}
    async with paused(stack) as client:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        held = stack.running._live._held
        assert held is not None
        await eventually(lambda: held._by_tenant["acme"] == 8)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429, refused.text
        await client.post("/resume", params={"model": "policy"})
        assert [(await answer).status_code for answer in waiting] == [200, 200]
        assert not held._by_tenant


async def test_invented_names_of_pauses_are_limited_and_cost_other_requests_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_PAUSED_PER_TENANT", 3)
    async with paused(stack) as client:
        statuses = [
            (await client.post("/pause", params={"model": name})).status_code
            for name in ("x", "y", "z", "policy")
        ]
        assert statuses == [200, 200, 429, 200]

        class Paused(dict[object, object]):
            def __iter__(self) -> None:  # type: ignore[override]
                raise AssertionError("a request looked at all pauses")

        monkeypatch.setattr(stack.running._live, "_paused", Paused(stack.running._live.paused()))
        body = {"model": "base", "prompt": [1], "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_the_end_of_a_pause_looks_only_at_the_requests_that_it_held_up(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "policy", "prompt": [1, 2, 3, 4], "max_tokens": 1}
    async with paused(stack) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        requests = stack.running._live
        await eventually(lambda: len(requests._held_up) == 1)
        looked_at = []
        is_paused = requests._is_paused
        monkeypatch.setattr(
            requests, "_is_paused", lambda each: looked_at.append(each) or is_paused(each)
        )
        for name in ("x", "y", "z"):
            assert (await client.post("/resume", params={"model": name})).status_code == 200
        assert looked_at == []
        await client.post("/resume", params={"model": "policy"})
        assert (await waiting).status_code == 200
        assert not requests._held_up


async def test_requests_that_follow_a_tag_leave_the_event_loop_to_others(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paused(stack):
        requests = stack.running._live
        begun: list[object] = []

        async def switch(followed: object) -> None:
            begun.append(followed)

        monkeypatch.setattr(requests, "_switch", switch)
        seen = [0]
        async with asyncio.TaskGroup() as group:
            group.create_task(requests._switch_all([object()] * 200))  # type: ignore[list-item]
            while len(begun) < 200:
                await asyncio.sleep(0)
                seen.append(len(begun))
        assert max(b - a for a, b in pairwise(seen)) <= 2 * live.SWITCHES_AT_ONCE
