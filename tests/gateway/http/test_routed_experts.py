"""The experts of each token over HTTP: who gets them, from where on, and in which form."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from loraplex.api.output import RoutedExperts, RoutingShape
from loraplex_services.gateway.http.routed_experts import npy_header
from tests.gateway.conftest import Stack
from tests.gateway.scripted_worker import ROUTING, experts_of
from tests.gateway.tiny_tokenizer import EOS_ID

IDS = [97, 98, 99, 100]
ASKED = {"return_routed_experts": True}
PATHS = ["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"]


@pytest.fixture
async def mixture(stack: Stack) -> Stack:
    stack.workers[0].has_experts = True
    stack.workers[0].script = lambda _: [*b"wxyz", EOS_ID]
    await stack.start()
    return stack


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == "/inference/v1/generate":
        params = {"max_tokens": 8, **fields}
        return {"model": "base", "token_ids": IDS, "sampling_params": params}
    if path == "/v1/completions":
        return {"model": "base", "prompt": IDS, "max_tokens": 8, **fields}
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "base", "messages": messages, "max_tokens": 8, **fields}


async def post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        return await client.post(path, json=body)


def expected(start: int, end: int) -> list[Any]:
    experts = experts_of(start, end)
    return np.frombuffer(experts.experts, np.uint8).reshape(experts.shape).tolist()


def loaded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.mark.parametrize("path", PATHS)
async def test_numpy_loads_the_experts_of_all_tokens_but_the_last(
    mixture: Stack, path: str
) -> None:
    answer = (await post(mixture, path, body_of(path, **ASKED))).json()
    num_prompt = len(mixture.workers[0].requests[0].prompt_ids)
    experts = loaded(answer["choices"][0]["routed_experts"])
    assert experts.dtype == np.uint8
    assert experts.tolist() == expected(0, num_prompt + 4)


@pytest.mark.parametrize("path", PATHS)
async def test_nobody_gets_experts_without_asking(mixture: Stack, path: str) -> None:
    for fields in ({}, {"return_routed_experts": False}, {"routed_experts_prompt_start": 2}):
        answer = (await post(mixture, path, body_of(path, **fields))).json()
        assert "routed_experts" not in answer["choices"][0]
    assert not any(r.HasField("routed_from") for r in mixture.workers[0].requests)


async def test_a_later_turn_asks_from_where_the_turn_before_ended(mixture: Stack) -> None:
    path = PATHS[0]
    fields = {"return_routed_experts": "raw", "routed_experts_prompt_start": 3, "n": 2}
    answer = await post(mixture, path, body_of(path, **fields))
    for choice in answer.json()["choices"]:
        raw = choice["routed_experts"]
        data = base64.b64decode(raw.pop("data"))
        assert np.frombuffer(data, raw["dtype"]).reshape(raw["shape"]).tolist() == expected(3, 8)
        assert raw == {"shape": [5, 3, 2], "dtype": "uint8", "start": 3}
    # Clients cut the data out of the body before they parse it.
    assert b'"routed_experts":{"data":"' in answer.content


async def test_a_stop_string_cuts_the_experts_with_the_tokens(mixture: Stack) -> None:
    path = "/v1/completions"
    body = body_of(path, stop="x", return_token_ids=True, **ASKED)
    choice = (await post(mixture, path, body)).json()["choices"][0]
    assert choice["token_ids"] == [*b"wx"]
    assert loaded(choice["routed_experts"]).tolist() == expected(0, 5)


async def test_the_experts_of_a_prompt_need_no_output(mixture: Stack) -> None:
    path = "/v1/completions"
    body = body_of(path, echo=True, **ASKED) | {"max_tokens": 0}
    choice = (await post(mixture, path, body)).json()["choices"][0]
    assert loaded(choice["routed_experts"]).tolist() == expected(0, 4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"return_routed_experts": "json"}, "'npy' or 'raw'"),
        ({"return_routed_experts": 1}, "'npy' or 'raw'"),
        ({**ASKED, "routed_experts_prompt_start": 99}, "the length of the prompt"),
        ({**ASKED, "routed_experts_prompt_start": -1}, "the length of the prompt"),
        ({**ASKED, "stream": True}, "not available in streams"),
    ],
    ids=str,
)
async def test_what_cannot_be_answered_is_refused_by_name(
    mixture: Stack, path: str, fields: dict[str, Any], why: str
) -> None:
    body = body_of(path, **{k: v for k, v in fields.items() if k != "stream"})
    body |= {"stream": fields.get("stream", False)}
    answer = await post(mixture, path, body)
    prefix = "sampling_params." if path == PATHS[0] else ""
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == prefix + "return_routed_experts"
    assert why in error["message"]
    assert not mixture.workers[0].requests


@pytest.mark.parametrize("path", PATHS)
async def test_a_dense_base_refuses_by_name(stack: Stack, path: str) -> None:
    await stack.start()
    answer = await post(stack, path, body_of(path, **ASKED))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith("return_routed_experts")
    assert "has no experts" in answer.json()["error"]["message"]


async def test_an_answer_has_a_largest_size(
    mixture: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "loraplex_services.gateway.pipeline.call_limits.MAX_ROUTED_EXPERT_BYTES"
    monkeypatch.setattr(limit, 2 * 3 * ROUTING.token_bytes)
    path = "/v1/completions"
    fits = body_of(path, routed_experts_prompt_start=1, n=2, **ASKED)
    assert (await post(mixture, path, fits)).status_code == 200
    answer = await post(mixture, path, fits | {"routed_experts_prompt_start": 0})
    assert answer.status_code == 400
    assert "start at a later position" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_tokens", [0, 1, 9, 10, 99_999])
@pytest.mark.parametrize("expert_bytes", [1, 2])
def test_numpy_reads_every_header(num_tokens: int, expert_bytes: int) -> None:
    routing = RoutingShape(2, 1, expert_bytes)
    experts = RoutedExperts(0, routing, bytes(range(2 * expert_bytes)) * num_tokens)
    header = npy_header(experts)
    assert len(header) % 64 == 0
    array = np.load(io.BytesIO(header + experts.experts), allow_pickle=False)
    assert array.shape == (num_tokens, 2, 1)
    assert array.dtype == routing.dtype
    assert array.tobytes() == experts.experts
