"""The console's page and what it polls: contents, headers, and who may see what."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from typing import Any

import pytest

from loraplex.v1 import registry_pb2
from loraplex_services.gateway.console import state
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of

READER = "lpx_reader01_" + "r" * 32
ADMIN = "lpx_admin001_" + "a" * 32


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status_code: int
    headers: Message
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


async def _get(stack: Stack, path: str, **headers: str) -> Answer:
    return await asyncio.to_thread(_got, stack.url + path, headers)


def _got(url: str, headers: dict[str, str]) -> Answer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers)) as found:
            return Answer(found.status, found.headers, found.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read().decode())


async def test_the_page_and_all_it_names_are_served_under_a_strict_policy(stack: Stack) -> None:
    await stack.start()
    page = await _get(stack, "/")
    assert page.headers["content-type"].startswith("text/html")
    names = set(re.findall(r'(?:href|src)="(/[^"]+)"', page.text))
    scripts = {name for name in names if name.endswith(".js")}
    todo = list(scripts)
    while todo:
        script = await _get(stack, todo.pop())
        found = {f"/console/{name}" for name in re.findall(r'from "\./([^"]+)"', script.text)}
        todo += found - names
        names |= found
    assert len(names) > 6
    for name in names:
        answer = await _get(stack, name)
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"""https?://(?!www\.w3\.org/)""", answer.text), name
    assert not re.search(r"<style|style=|<script>| on\w+=", page.text)


async def test_state_tells_of_bases_workers_and_load(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    await stack.start()
    await stack.openai().completions.create(model="upper", prompt="abc")
    shown = (await _get(stack, "/console/state")).json()
    assert shown["not_ready_reason"] == ""
    assert [base["id"] for base in shown["bases"]] == ["base"]
    assert [(worker["id"], worker["state"]) for worker in shown["workers"]] == [("w0", "ready")]
    assert shown["totals"]["completion_tokens"] >= 1
    bounds = [bound for bound, _ in shown["totals"]["first_token_s"]]
    assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])


async def test_adapters_come_with_versions_tags_and_search(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    stack.registry.put("upper", 2)
    stack.registry.put("lower", 1)
    stack.registry.tag("upper", "prod", {1: 1, 2: 3})
    await stack.start()
    found = (await _get(stack, "/console/adapters?search=UPP")).json()
    assert found["total"] == 1
    (upper,) = found["adapters"]
    assert [version["number"] for version in upper["versions"]] == [2, 1]
    assert upper["versions"][0]["digest"] == digest_of("upper", 2)
    tags = {tag["tag"]: tag["sides"] for tag in upper["tags"]}
    assert tags["prod"] == [{"number": 1, "weight": 1}, {"number": 2, "weight": 3}]
    assert (await _get(stack, "/console/adapters")).json()["total"] == 2


async def test_with_keys_the_page_is_open_and_the_facts_are_not(stack: Stack) -> None:
    stack.wants_keys = True
    stack.registry.keys = {
        READER: registry_pb2.Key(key_id="reader01", tenant="acme", scopes=["reader"]),
        ADMIN: registry_pb2.Key(key_id="admin001", tenant="acme", scopes=["admin"]),
    }
    stack.registry.put("mine", tenant="acme")
    stack.registry.put("theirs", tenant="other")
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    assert (await _get(stack, "/")).status_code == 200
    for path in ("/console/state", "/console/adapters"):
        assert (await _get(stack, path)).status_code == 401
    reader = {"authorization": f"Bearer {READER}"}
    shown = (await _get(stack, "/console/state", **reader)).json()
    assert (shown["workers"], "totals" in shown) == (None, False)
    found = (await _get(stack, "/console/adapters", **reader)).json()
    assert [adapter["name"] for adapter in found["adapters"]] == ["mine"]
    shown = (await _get(stack, "/console/state", authorization=f"Bearer {ADMIN}")).json()
    assert len(shown["workers"]) == 1


async def test_other_sites_cannot_reach_it_without_keys(stack: Stack) -> None:
    await stack.start()
    answer = await _get(stack, "/console/state", host="evil.example")
    assert answer.status_code == 403


def test_search_is_capped_and_says_how_many_there_are() -> None:
    listings: Any = [
        type("L", (), {"tenant": "acme", "name": f"a{place}"})() for place in range(30)
    ]
    page, total = state.found(listings, "acme/a1", 5)
    assert (len(page), total) == (5, 11)


@pytest.mark.parametrize("name", ["state", "adapters"])
async def test_answers_are_plain_json_that_nobody_keeps(stack: Stack, name: str) -> None:
    await stack.start()
    answer = await _get(stack, f"/console/{name}")
    assert answer.headers["cache-control"] == "no-store"
    json.loads(answer.text)
