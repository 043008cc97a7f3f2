"""Who may pause, and what is refused."""

from __future__ import annotations

import httpx2 as httpx
import pytest

from loraplex.v1 import registry_pb2
from tests.gateway.conftest import Stack


@pytest.mark.parametrize(
    "params",
    [{"mode": "stop"}, {"clear_cache": "perhaps"}, {"model": "a b"}, {"seconds": "3"}],
    ids=str,
)
async def test_bad_parameters_are_named(stack: Stack, params: dict[str, str]) -> None:
    await stack.start()
    async with httpx.AsyncClient(base_url=stack.url) as client:
        answer = await client.post("/pause", params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(params))


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache"])
async def test_pages_of_other_sites_cannot_pause(stack: Stack, path: str) -> None:
    await stack.start()
    async with httpx.AsyncClient(base_url=stack.url) as client:
        answer = await client.post(path, headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 403


async def test_trainers_may_ask_for_a_reset_of_the_prefix_cache(stack: Stack) -> None:
    await stack.start()
    async with httpx.AsyncClient(base_url=stack.url) as client:
        answer = await client.post("/reset_prefix_cache", json={"reset_running_requests": True})
        assert (answer.status_code, answer.json()) == (200, {"success": True})


@pytest.mark.parametrize(
    ("scopes", "model", "status"),
    [
        (["reader"], "policy", 403),
        (["publisher"], "policy", 403),
        (["admin"], "policy", 200),
        (["admin"], "", 403),
        (["admin"], "rival/policy", 403),
        (["admin", "root"], "", 200),
        (["admin", "root"], "rival/policy", 200),
    ],
    ids=str,
)
async def test_with_keys_admins_pause_their_own(
    stack: Stack, scopes: list[str], model: str, status: int
) -> None:
    stack.wants_keys = True
    token = "lpx_admin001_" + "a" * 43
    stack.registry.keys[token] = registry_pb2.Key(key_id="admin001", tenant="acme", scopes=scopes)
    await stack.start(ready=False)
    async with httpx.AsyncClient(base_url=stack.url) as client:
        answer = await client.post(
            "/pause", params={"model": model}, headers={"authorization": f"Bearer {token}"}
        )
        assert answer.status_code == status
