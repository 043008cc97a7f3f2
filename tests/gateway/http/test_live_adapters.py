"""Adapters that change while they serve: which weights computed which token, and pauses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from loraplex import InferenceClient, Sampling
from loraplex.errors import DataLoss
from loraplex.v1 import registry_pb2, worker_pb2
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of

NUM_TOKENS = 60


def letter_of(digest: str) -> int:
    """What the scripted worker generates with a version: a, b, c..."""
    return 96 + int(digest[-4:], 16)


def by_version(request: worker_pb2.WorkerRequest) -> list[int]:
    letter = letter_of(request.adapters[0].digest) if request.adapters else ord("-")
    return [letter] * request.sampling.max_tokens


@pytest.fixture
async def live(stack: Stack) -> AsyncIterator[Stack]:
    """Two adapters, of which `policy` will be updated, on a worker that takes its time."""
    stack.workers[0].script = by_version
    stack.workers[0].step_s = 0.01
    stack.registry.put("policy", 1)
    stack.registry.put("other", 1)
    await stack.start()
    yield stack


async def _post(stack: Stack, path: str, body: Any = None, **params: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url, timeout=30.0) as client:
        return await client.post(path, json=body, params=params)


def _body(model: str = "policy", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS} | fields


def _start(stack: Stack, **fields: Any) -> asyncio.Task[httpx.Response]:
    fields = {"return_token_ids": True, **fields}
    return asyncio.create_task(_post(stack, "/v1/completions", _body(**fields)))


async def _until_running(stack: Stack, num_tokens: int = 5) -> None:
    sent = stack.workers[0].num_tokens_sent
    await eventually(lambda: stack.workers[0].num_tokens_sent >= sent + num_tokens)


async def _update(live: Stack, version: int) -> None:
    """Publish a version of `policy` while its request stands, and wait until it is followed."""
    worker = live.workers[0]
    num_requests = len(worker.requests)
    live.registry.put("policy", version)
    await eventually(lambda: len(worker.requests) > num_requests)
    worker.stands_at = None


async def _until_known(live: Stack, version: int) -> None:
    """Wait until the gateway knows a version of `policy`."""
    snapshot = live.running._resolver.snapshot
    await eventually(lambda: snapshot.version("default", "policy", version) is not None)


def _check_labels(choice: dict[str, Any]) -> list[int]:
    """Each token is what the weights that it is labelled with generate; returns the versions."""
    ids, versions = choice["token_ids"], []
    for span in choice["weights"]:
        (digest,) = span["digests"]
        version = int(digest[-4:], 16)
        assert digest == digest_of("policy", version)
        assert span["adapters"] == [f"default/policy:v{version}"]
        part = ids[span["start"] : span["start"] + span["length"]]
        assert part == [letter_of(digest)] * span["length"]
        versions.append(version)
    assert sum(span["length"] for span in choice["weights"]) == len(ids)
    return versions


async def test_a_running_request_finishes_with_its_version_by_default(live: Stack) -> None:
    running = _start(live)
    await _until_running(live)
    live.registry.put("policy", 2)
    choice = (await running).json()["choices"][0]
    assert _check_labels(choice) == [1]
    assert len(choice["token_ids"]) == NUM_TOKENS
    choice = (await _start(live)).json()["choices"][0]
    assert _check_labels(choice) == [2]


@pytest.mark.parametrize("policy", ["follow", "follow_keep_prefix"])
async def test_a_request_that_follows_its_tag_switches_once_the_version_is_loaded(
    live: Stack, policy: str
) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 3
    running = _start(live, on_update=policy)
    await _until_running(live)
    await _update(live, 2)
    worker.stands_at = 2 * NUM_TOKENS // 3
    await _until_running(live)
    await _update(live, 3)
    choice = (await running).json()["choices"][0]
    assert _check_labels(choice) == [1, 2, 3]
    assert len(choice["token_ids"]) == NUM_TOKENS
    assert live.workers[0].loads == [digest_of("policy", 2), digest_of("policy", 3)]
    first, second, third = live.workers[0].requests
    assert len(first.output_ids) < len(second.output_ids) < len(third.output_ids)
    if policy == "follow":
        assert not second.kept
        assert not third.kept
        return
    assert [part.adapters[0].digest for part in third.kept] == [
        digest_of("policy", 1),
        digest_of("policy", 2),
    ]
    assert [part.num_tokens for part in third.kept] == [
        3 + len(second.output_ids) - 1,
        3 + len(third.output_ids) - 1,
    ]


@pytest.mark.hostile
async def test_a_request_remembers_no_versions_that_gave_it_no_tokens(live: Stack) -> None:
    worker = live.workers[0]
    worker.stands_at = 20
    running = _start(live, on_update="follow_keep_prefix", n=2)
    await eventually(lambda: worker.num_tokens_sent == 2 * 20)
    [followed] = live.running._live.all()
    num_labels = []
    for version in range(2, 80):
        num_requests = len(worker.requests)
        live.registry.put("policy", version)
        await eventually(lambda before=num_requests: len(worker.requests) == before + 2)
        num_labels.append(len(followed.prepared.labels))
    assert 30 < max(num_labels) < 40
    assert [part.adapters[0].digest for part in worker.requests[-1].kept] == [
        digest_of("policy", 1)
    ]
    worker.stands_at = 40
    await eventually(lambda: worker.num_tokens_sent == 2 * 40)
    await _update(live, 80)
    for choice in (await running).json()["choices"]:
        assert _check_labels(choice) == [1, 79, 80]
        assert len(choice["token_ids"]) == NUM_TOKENS


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_answers_of_the_other_apis_follow_and_name_their_weights_too(
    live: Stack, path: str
) -> None:
    body: dict[str, Any] = {"model": "policy", "on_update": "follow"}
    if path == "/v1/responses":
        body |= {"input": "hi", "max_output_tokens": NUM_TOKENS}
    else:
        body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM_TOKENS}
    live.workers[0].stands_at = NUM_TOKENS // 2
    running = asyncio.create_task(_post(live, path, body))
    await _until_running(live)
    await _update(live, 2)
    answer = (await running).json()
    assert [span["digests"] for span in answer["weights"]] == [
        [digest_of("policy", 1)],
        [digest_of("policy", 2)],
    ]
    assert sum(span["length"] for span in answer["weights"]) == NUM_TOKENS


async def test_other_requests_are_not_touched_by_an_update(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    others = [_start(live, model="other", on_update="follow"), _start(live, model="base")]
    running = _start(live, on_update="follow")
    await eventually(lambda: len(live.workers[0].requests) == 3)
    await _update(live, 2)
    assert _check_labels((await running).json()["choices"][0]) == [1, 2]
    other, base = [(await each).json()["choices"][0] for each in others]
    assert [span["digests"] for span in other["weights"]] == [[digest_of("other", 1)]]
    assert "weights" not in base
    assert len(live.workers[0].requests) == 4


async def test_a_version_whose_tokens_mean_something_else_is_not_followed(live: Stack) -> None:
    running = _start(live, on_update="follow")
    await _until_running(live)
    made = live.registry.put("policy", 2, announce=False)
    made.eos_token_ids.append(7)
    event = registry_pb2.AdapterEvent(version=made)
    live.registry._announce(event)
    live.registry.tag("policy", "latest", {2: 1})
    assert _check_labels((await running).json()["choices"][0]) == [1]


async def test_a_version_that_cannot_be_loaded_is_not_followed(live: Stack) -> None:
    live.workers[0].fail_loads = [DataLoss("damaged")]
    running = _start(live, on_update="follow")
    await _until_running(live)
    live.registry.put("policy", 2)
    assert _check_labels((await running).json()["choices"][0]) == [1]


async def test_a_version_after_one_that_cannot_be_loaded_is_followed(live: Stack) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 2
    worker.fail_loads = [DataLoss("damaged")]
    worker.may_load.clear()
    running = _start(live, on_update="follow")
    await _until_running(live)
    live.registry.put("policy", 2)
    await eventually(lambda: worker.loads == [digest_of("policy", 2)])
    live.registry.put("policy", 3)
    await _until_known(live, 3)
    worker.may_load.set()
    await eventually(lambda: len(worker.requests) == 2)
    worker.stands_at = None
    assert _check_labels((await running).json()["choices"][0]) == [1, 3]


async def test_every_chunk_of_a_stream_names_the_weights_of_its_tokens(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    body = _body(on_update="follow", stream=True, return_token_ids=True)
    spans, ids = [], []
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=30.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            ids += choice["token_ids"]
            spans += choice["weights"]
            if len(ids) >= 10 and ("default", "policy", 2) not in live.registry.versions:
                await _update(live, 2)
    versions = _check_labels({"token_ids": ids, "weights": spans})
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    assert [span["start"] for span in spans] == sorted(span["start"] for span in spans)


async def test_chat_and_generate_name_the_weights_too(live: Stack) -> None:
    chat = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = (await _post(live, "/v1/chat/completions", chat | {"return_token_ids": True})).json()
    assert _check_labels(answer["choices"][0]) == [1]
    asked = {"model": "policy", "token_ids": [1], "sampling_params": {"max_tokens": 4}}
    answer = (await _post(live, "/inference/v1/generate", asked)).json()
    assert _check_labels(answer["choices"][0]) == [1]
    chunks = (await _post(live, "/v1/chat/completions", chat | {"stream": True})).text
    found = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: {")]
    spans = [span for chunk in found for span in chunk["choices"][0].get("weights", [])]
    assert sum(span["length"] for span in spans) == 4


async def test_the_sdk_sees_the_digests_of_each_chunk_and_of_the_answer(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    async with InferenceClient(live.grpc_address) as client:
        pieces = []
        sampling = Sampling(max_tokens=NUM_TOKENS)
        async for piece in client.generate("policy", [1, 2], sampling, on_update="follow"):
            pieces.append(piece)
            if len(pieces) == 5:
                await _update(live, 2)
        for piece in pieces:
            assert all(letter_of(piece.digests[0]) == token for token in piece.token_ids)
        served = [piece.served_by.adapters for piece in pieces if piece.served_by]
        assert served == [("default/policy:v1",), ("default/policy:v2",)]
        done = await client.complete("policy", [1, 2], sampling)
        (span,) = done.choices[0].spans
        assert (span.start, span.num_tokens) == (0, NUM_TOKENS)
        assert span.digests == (digest_of("policy", 2),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"on_update": "restart"}, "on_update"),
        ({"on_update": 3}, "on_update"),
        ({"on_update": "follow", "model": "base"}, "on_update"),
        ({"on_update": "follow", "model": "policy:v1"}, "on_update"),
        ({"on_update": "follow", "model": "policy@" + digest_of("policy", 1)}, "on_update"),
        (
            {
                "on_update": "follow",
                "model": "base",
                "adapters": [{"ref": "policy"}, {"ref": "other:v1"}],
            },
            "on_update",
        ),
    ],
    ids=str,
)
async def test_only_tags_are_followed(live: Stack, fields: dict[str, Any], param: str) -> None:
    answer = await _post(live, "/v1/completions", _body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_keep_freezes_running_requests_and_lets_them_go_on(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running, other = _start(live), _start(live, model="other")
    await eventually(lambda: live.workers[0].num_live == 2)
    assert (await _post(live, "/pause", mode="keep", model="Policy")).json() == {"status": "paused"}
    await eventually(lambda: live.workers[0].num_live == 1)
    late = _start(live, max_tokens=3)
    live.workers[0].stands_at = None
    assert len((await other).json()["choices"][0]["token_ids"]) == NUM_TOKENS
    assert live.workers[0].num_live == 0
    assert not running.done()
    assert not late.done()
    live.registry.put("policy", 2)
    assert (await _post(live, "/resume", model="policy")).json() == {"status": "resumed"}
    choice = (await running).json()["choices"][0]
    assert _check_labels(choice) == [1]
    assert len(choice["token_ids"]) == NUM_TOKENS
    assert len((await late).json()["choices"][0]["token_ids"]) == 3


async def test_a_follower_goes_on_with_what_was_published_during_a_pause(live: Stack) -> None:
    running = _start(live, on_update="follow_keep_prefix")
    await _until_running(live)
    await _post(live, "/pause", mode="keep", clear_cache="false")
    live.registry.put("policy", 2)
    await _until_known(live, 2)
    await asyncio.sleep(0.05)
    await _post(live, "/resume")
    choice = (await running).json()["choices"][0]
    assert _check_labels(choice) == [1, 2]
    assert len(choice["token_ids"]) == NUM_TOKENS


async def test_a_follower_that_came_during_a_pause_begins_with_what_was_published_in_it(
    live: Stack,
) -> None:
    assert (await _post(live, "/pause", mode="keep", model="policy")).status_code == 200
    waiting = _start(live, on_update="follow")
    await eventually(lambda: bool(live.running._live._held_up))
    live.registry.put("policy", 2)
    await _until_known(live, 2)
    assert (await _post(live, "/resume", model="policy")).status_code == 200
    assert _check_labels((await waiting).json()["choices"][0]) == [2]


async def test_a_client_that_does_not_read_delays_no_pause(live: Stack) -> None:
    body = _body(stream=True, max_tokens=400)
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=30.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        await _until_running(live)
        for mode in ("keep", "abort"):
            assert (await _post(live, "/pause", mode=mode)).status_code == 200
            await eventually(lambda: live.workers[0].num_live == 0)


async def test_abort_answers_with_what_was_generated(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running, chat = _start(live, n=2), _start(live, model="other")
    await eventually(lambda: live.workers[0].num_live == 3)
    assert (await _post(live, "/pause")).status_code == 200
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
    assert (await _start(live, max_tokens=2)).json()["choices"][0]["finish_reason"] == "length"


async def test_wait_lets_running_requests_end(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    running = _start(live)
    await _until_running(live)
    pausing = asyncio.create_task(_post(live, "/pause", mode="wait"))
    async with httpx.AsyncClient(base_url=live.url) as client:
        while not (await client.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0.01)
    late = _start(live, max_tokens=2)
    live.workers[0].stands_at = None
    assert len((await running).json()["choices"][0]["token_ids"]) == NUM_TOKENS
    assert (await pausing).status_code == 200
    assert not late.done()
    await _post(live, "/resume")
    assert (await late).json()["choices"][0]["finish_reason"] == "length"


async def test_both_pauses_must_end(live: Stack) -> None:
    for model in ("", "policy"):
        await _post(live, "/pause", mode="wait", model=model)
    waiting = _start(live, max_tokens=2)
    await _post(live, "/resume")
    assert (await _start(live, model="other", max_tokens=2)).status_code == 200
    assert not waiting.done()
    await _post(live, "/resume", model="policy")
    assert (await waiting).status_code == 200


async def test_a_deadline_passes_during_a_pause_too(live: Stack) -> None:
    await _post(live, "/pause")
    live.running._generation._max_request_s = 0.2
    assert (await _start(live)).status_code == 504
