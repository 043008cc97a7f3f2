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

import openai
import pytest

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.api.wire import residency_to_proto
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.pipeline.history import MAX_MODELS
from loraplex_services.gateway.registry.snapshot import Version
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
    return _sent(urllib.request.Request(url, headers=headers))


def _sent(request: urllib.request.Request) -> Answer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as found:
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
    assert shown["recent"]["requests"] == 1 and shown["recent"]["tokens_per_s"] > 0
    assert shown["recent"]["first_token_p50_s"] > 0
    [model] = shown["recent"]["models"]
    assert (model["model"], model["errors"]) == ("default/upper", 0)


async def test_charts_and_failures_come_from_the_gateway_s_own_history(stack: Stack) -> None:
    await stack.start()
    await stack.openai().completions.create(model="base", prompt="abc")
    with pytest.raises(openai.NotFoundError):
        await stack.openai().completions.create(model="nobody", prompt="abc")
    for name in ("5m", "24h"):
        shown = (await _get(stack, f"/console/history?range={name}")).json()
        columns = shown["columns"]
        assert sum(columns["served_per_s"]) > 0 and sum(columns["failed_per_s"]) > 0
        assert any(each is not None for each in columns["first_token_p50_s"])
        assert len({len(column) for column in columns.values()}) == 1
        assert shown["failures"] == [["adapter_not_found", 1]]
    answer = await _get(stack, "/console/history?range=9y")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "range")
    assert "24h" in answer.text


async def test_a_worker_that_is_gone_shows_no_stale_load(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    stack.registry.put("copy", 1).digest = digest_of("upper", 1)
    await stack.start()
    await stack.openai().completions.create(model="upper", prompt="abc")
    held = AdapterResidency(digest_of("upper", 1), Tier.DEVICE, running_requests=1)
    stack.workers[0].publish(residency_to_proto(held))

    async def workers() -> list[dict[str, Any]]:
        return (await _get(stack, "/console/state")).json()["workers"]

    await eventually(lambda: any(v.adapters for v in stack.running._fleet.views()))
    [before] = await workers()
    [chip] = before["adapters"]
    assert set(chip["names"]) == {"default/upper:v1", "default/copy:v1"}, "two of one content"
    await stack.servers["w0"].stop(None)
    await eventually(lambda: not any(v.connected for v in stack.running._fleet.views()))
    shown = (await _get(stack, "/console/state")).json()
    [gone] = await workers()
    assert shown["not_ready_reason"] == "no worker is ready"
    assert (gone["state"], gone["running"], gone["total_blocks"]) == ("unreachable", 0, 0)
    assert (gone["on_device"], gone["adapters"]) == (0, [])


async def test_adapters_come_in_pages_that_are_filtered_and_sorted(stack: Stack) -> None:
    for number in range(1, 53):
        stack.registry.put(f"a{number:02d}", 1)
    for number in (1, 2, 3, 4, 5):
        stack.registry.put("upper", number, labels={"team": "Search"})
    stack.registry.tag("upper", "prod", {1: 1, 2: 3})
    await stack.start()

    async def names(query: str) -> tuple[list[str], int, int]:
        found = (await _get(stack, f"/console/adapters?{query}")).json()
        return [each["name"] for each in found["adapters"]], found["total"], found["num_pages"]

    first, total, num_pages = await names("")
    assert (first[0], len(first), total, num_pages) == ("a01", 50, 53, 2)
    assert (await names("page=2"))[0] == ["a51", "a52", "upper"]
    assert (await names("page=9"))[0] == []
    assert (await names("search=UPP"))[:2] == (["upper"], 1)
    assert (await names("search=prod"))[0] == (await names("tag=prod"))[0] == ["upper"]
    assert (await names("search=team=sea"))[0] == (await names("search=SEARCH"))[0] == ["upper"]
    assert (await names("sort=versions"))[0][0] == "upper"
    assert (await names("base=other"))[1] == (await names("resident=true"))[1] == 0
    [upper] = (await _get(stack, "/console/adapters?search=upper")).json()["adapters"]
    assert [version["number"] for version in upper["versions"]] == [5, 4, 3]
    assert upper["num_versions"] == 5
    assert upper["versions"][0]["digest"] == digest_of("upper", 5)
    tags = {tag["tag"]: tag["targets"] for tag in upper["tags"]}
    assert tags["prod"] == [{"number": 1, "weight": 1}, {"number": 2, "weight": 3}]


@pytest.mark.parametrize("query", ["sort=colour", "page=0", "page=x", "page=-1"])
async def test_bad_queries_are_refused_by_name(stack: Stack, query: str) -> None:
    await stack.start()
    answer = await _get(stack, f"/console/adapters?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_ten_thousand_adapters_are_listed_a_page_at_a_time(stack: Stack) -> None:
    await stack.start()
    snapshot = stack.running._resolver.snapshot
    for number in range(10_000):
        snapshot.put_version(Version("default", f"n{number:05d}", 1, f"sha256:{number:064x}", "b"))
    found = (await _get(stack, "/console/adapters?page=200")).json()
    assert (found["total"], found["num_pages"], len(found["adapters"])) == (10_000, 200, 50)
    assert found["adapters"][-1]["name"] == "n09999"


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
    for path in ("/console/state", "/console/history", "/console/adapters"):
        assert (await _get(stack, path)).status_code == 401
    reader = {"authorization": f"Bearer {READER}"}
    shown = (await _get(stack, "/console/state", **reader)).json()
    assert (shown["workers"], "recent" in shown) == (None, False)
    assert (await _get(stack, "/console/history", **reader)).status_code == 403
    found = (await _get(stack, "/console/adapters", **reader)).json()
    assert [adapter["name"] for adapter in found["adapters"]] == ["mine"]
    shown = (await _get(stack, "/console/state", authorization=f"Bearer {ADMIN}")).json()
    assert len(shown["workers"]) == 1


async def test_the_use_of_an_adapter_is_shown_to_its_tenant_and_to_no_other(stack: Stack) -> None:
    stack.wants_keys = True
    stack.registry.keys = {
        READER: registry_pb2.Key(key_id="reader01", tenant="acme", scopes=["reader"]),
        ADMIN: registry_pb2.Key(key_id="admin001", tenant="other", scopes=["admin"]),
    }
    stack.registry.put("public", tenant="other", visibility=registry_pb2.VISIBILITY_PUBLIC)
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    client = stack.openai().with_options(api_key=ADMIN)
    await client.completions.create(model="public", prompt="a", max_tokens=1)
    for number in range(MAX_MODELS):
        history = stack.running._generation.usage.history
        history.ended("ok", f"busy/m{number}", generated_tokens=9)
    for key, requests in ((ADMIN, 1), (READER, 0)):
        auth = {"authorization": f"Bearer {key}"}
        [row] = (await _get(stack, "/console/adapters", **auth)).json()["adapters"]
        shown = (await _get(stack, "/console/adapter?name=other/public", **auth)).json()
        assert (row["requests"], bool(shown["last_minute"])) == (requests, requests > 0)


async def test_other_sites_cannot_reach_it_without_keys(stack: Stack) -> None:
    await stack.start()
    answer = await _get(stack, "/console/state", host="evil.example")
    assert answer.status_code == 403


@pytest.mark.parametrize("name", ["state", "adapters"])
async def test_answers_are_plain_json_that_nobody_keeps(stack: Stack, name: str) -> None:
    await stack.start()
    answer = await _get(stack, f"/console/{name}")
    assert answer.headers["cache-control"] == "no-store"
    json.loads(answer.text)


async def test_one_adapter_is_shown_to_those_who_may_run_it(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    stack.registry.put("upper", 2)
    stack.registry.put("theirs", tenant="other")
    await stack.start()
    await stack.openai().completions.create(model="upper", prompt="a", max_tokens=1)
    shown = (await _get(stack, "/console/adapter?name=upper")).json()
    assert [version["number"] for version in shown["versions"]] == [2, 1]
    assert shown["last_minute"]["requests"] == 1 and shown["may_change"]
    for name, status in (("other/theirs", 404), ("nobody", 404), ("a/b/c", 400), ("", 400)):
        answer = await _get(stack, f"/console/adapter?name={name}")
        assert answer.status_code == status
        assert status != 404 or "see `registry list` or /v1/models" in answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "upper", "action": "burn"}, "action"),
        ({"name": "upper", "action": "tag", "tag": "prod", "targets": [1]}, "targets"),
        ({"name": "upper", "action": "tag", "tag": "prod", "targets": {"1": "x"}}, "targets"),
        ({"name": "upper", "action": "tag", "tag": "prod", "targets": {"one": 1}}, "targets"),
        ({"name": "up per", "action": "delete", "version": 1}, "name"),
        ({"name": "upper", "action": "delete", "version": "1"}, "version"),
        ({"name": "upper", "action": "delete", "version": 1, "all": True}, "all"),
    ],
)
async def test_changes_that_are_not_understood_name_the_field(
    stack: Stack, body: dict[str, Any], param: str
) -> None:
    await stack.start()
    request = urllib.request.Request(
        f"{stack.url}/console/adapter",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    answer = await asyncio.to_thread(_sent, request)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_form_of_another_site_changes_nothing(stack: Stack) -> None:
    await stack.start()
    body = json.dumps({"name": "upper", "action": "delete", "version": 1}).encode()
    plain = urllib.request.Request(
        f"{stack.url}/console/adapter", body, {"content-type": "text/plain"}
    )
    assert (await asyncio.to_thread(_sent, plain)).status_code == 400
