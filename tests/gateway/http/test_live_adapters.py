"""Adapters that change while they serve: which weights computed which token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest

from loraplex import InferenceClient, Sampling
from loraplex.errors import DataLoss
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.pipeline import live as pipeline_live
from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.live import (
    NUM_TOKENS,
    check_labels,
    letter_of,
    policy_body,
    post,
    start,
    until_known,
    until_running,
    update,
)
from tests.gateway.scripted_registry import digest_of


async def test_a_running_request_finishes_with_its_version_by_default(live: Stack) -> None:
    running = start(live)
    await until_running(live)
    live.registry.put("policy", 2)
    choice = (await running).json()["choices"][0]
    assert check_labels(choice) == [1]
    assert len(choice["token_ids"]) == NUM_TOKENS
    assert live.workers[0].loads == []
    choice = (await start(live)).json()["choices"][0]
    assert check_labels(choice) == [2]


@pytest.mark.parametrize("policy", ["follow", "follow_keep_prefix"])
async def test_a_request_that_follows_its_tag_switches_once_the_version_is_loaded(
    live: Stack, policy: str
) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 3
    running = start(live, on_update=policy)
    await until_running(live)
    await update(live, 2)
    worker.stands_at = 2 * NUM_TOKENS // 3
    await until_running(live)
    await update(live, 3)
    choice = (await running).json()["choices"][0]
    assert check_labels(choice) == [1, 2, 3]
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


async def test_a_version_is_loaded_for_its_followers_before_its_tag_moves(live: Stack) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 2
    running = start(live, on_update="follow")
    await until_running(live)
    made = registry_pb2.AdapterEvent(version=live.registry.put("policy", 2, announce=False))
    live.registry._announce(made)
    await eventually(lambda: worker.loads == [digest_of("policy", 2)])
    live.registry._announce(made)  # as if its labels changed
    live.registry.tag("policy", "latest", {2: 1})
    await eventually(lambda: len(worker.requests) == 2)
    worker.stands_at = None
    assert check_labels((await running).json()["choices"][0]) == [1, 2]
    assert worker.loads == [digest_of("policy", 2)]


async def test_a_version_of_an_adapter_in_use_is_loaded_before_a_request_needs_it(
    live: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = live.workers[0]
    await start(live)
    live.registry.put("other", 2)  # nobody has used it
    live.registry.put("policy", 2)
    await eventually(lambda: worker.loads == [digest_of("policy", 2)])
    monkeypatch.setattr(pipeline_live, "IN_USE_S", 0.0)
    live.registry.put("policy", 3)
    worker.stands_at = NUM_TOKENS // 2
    running = start(live, model="other", on_update="follow")
    await until_running(live)
    live.registry.put("other", 3)
    await eventually(lambda: worker.loads == [digest_of("policy", 2), digest_of("other", 3)])
    worker.stands_at = None
    await running


@pytest.mark.hostile
async def test_a_request_remembers_no_versions_that_gave_it_no_tokens(live: Stack) -> None:
    worker = live.workers[0]
    worker.stands_at = 20
    running = start(live, on_update="follow_keep_prefix", n=2)
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
    await update(live, 80)
    for choice in (await running).json()["choices"]:
        assert check_labels(choice) == [1, 79, 80]
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
    running = asyncio.create_task(post(live, path, body))
    await until_running(live)
    await update(live, 2)
    answer = (await running).json()
    assert [span["digests"] for span in answer["weights"]] == [
        [digest_of("policy", 1)],
        [digest_of("policy", 2)],
    ]
    assert sum(span["length"] for span in answer["weights"]) == NUM_TOKENS


async def test_other_requests_are_not_touched_by_anupdate(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    others = [start(live, model="other", on_update="follow"), start(live, model="base")]
    running = start(live, on_update="follow")
    await eventually(lambda: len(live.workers[0].requests) == 3)
    await until_running(live)
    await update(live, 2)
    assert check_labels((await running).json()["choices"][0]) == [1, 2]
    other, base = [(await each).json()["choices"][0] for each in others]
    assert [span["digests"] for span in other["weights"]] == [[digest_of("other", 1)]]
    assert "weights" not in base
    assert len(live.workers[0].requests) == 4


async def test_a_version_whose_tokens_mean_something_else_is_not_followed(live: Stack) -> None:
    running = start(live, on_update="follow")
    await until_running(live)
    made = live.registry.put("policy", 2, announce=False)
    made.eos_token_ids.append(7)
    event = registry_pb2.AdapterEvent(version=made)
    live.registry._announce(event)
    live.registry.tag("policy", "latest", {2: 1})
    assert check_labels((await running).json()["choices"][0]) == [1]


async def test_a_version_that_cannot_be_loaded_is_not_followed(live: Stack) -> None:
    live.workers[0].fail_loads = [DataLoss("damaged"), DataLoss("damaged")]
    running = start(live, on_update="follow")
    await until_running(live)
    live.registry.put("policy", 2)
    assert check_labels((await running).json()["choices"][0]) == [1]


async def test_a_version_after_one_that_cannot_be_loaded_is_followed(live: Stack) -> None:
    worker = live.workers[0]
    worker.stands_at = NUM_TOKENS // 2
    worker.fail_loads = [DataLoss("damaged")]
    worker.may_load.clear()
    running = start(live, on_update="follow")
    await until_running(live)
    live.registry.put("policy", 2)
    await eventually(lambda: worker.loads == [digest_of("policy", 2)])
    live.registry.put("policy", 3)
    await until_known(live, 3)
    worker.may_load.set()
    await eventually(lambda: len(worker.requests) == 2)
    worker.stands_at = None
    assert check_labels((await running).json()["choices"][0]) == [1, 3]


async def test_every_chunk_of_a_stream_names_the_weights_of_its_tokens(live: Stack) -> None:
    live.workers[0].stands_at = NUM_TOKENS // 2
    body = policy_body(on_update="follow", stream=True, return_token_ids=True)
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
                await update(live, 2)
    versions = check_labels({"token_ids": ids, "weights": spans})
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    assert [span["start"] for span in spans] == sorted(span["start"] for span in spans)


async def test_chat_and_generate_name_the_weights_too(live: Stack) -> None:
    chat = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = (await post(live, "/v1/chat/completions", chat | {"return_token_ids": True})).json()
    assert check_labels(answer["choices"][0]) == [1]
    asked = {"model": "policy", "token_ids": [1], "sampling_params": {"max_tokens": 4}}
    answer = (await post(live, "/inference/v1/generate", asked)).json()
    assert check_labels(answer["choices"][0]) == [1]
    chunks = (await post(live, "/v1/chat/completions", chat | {"stream": True})).text
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
                await update(live, 2)
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
    answer = await post(live, "/v1/completions", policy_body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
