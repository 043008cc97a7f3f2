"""Token ids in and out: /inference/v1/generate, prompt logprobs, boolean logprobs."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.scripted_registry import digest_of
from tests.gateway.tiny_tokenizer import EOS_ID

IDS = [97, 98, 99]


async def _post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        return await client.post(path, json=body)


async def _generate(stack: Stack, **fields: Any) -> httpx.Response:
    body = {"model": "base", "token_ids": IDS, "sampling_params": {"max_tokens": 3}} | fields
    return await _post(stack, "/inference/v1/generate", body)


async def test_generate_answers_with_token_ids_and_logprobs(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [*b"yz", EOS_ID]
    await stack.start()
    params = {"max_tokens": 8, "logprobs": 0, "prompt_logprobs": 1, "n": 2, "output_kind": 2}
    answer = (await _generate(stack, sampling_params=params, request_id="r-1")).json()
    assert answer["request_id"] == "r-1"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*b"yz", EOS_ID]
    assert choice["finish_reason"] == "stop"
    shown = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in shown] == [-0.5] * 3
    assert shown[0] == {
        "token": "token_id:121",
        "token_id": 121,
        "logprob": -0.5,
        "bytes": None,
        "top_logprobs": [],
    }
    first, second, _ = answer["prompt_logprobs"]
    assert first is None
    assert second == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    assert stack.workers[0].requests[0].prompt_ids == IDS


async def test_generate_takes_the_values_that_clients_of_vllm_always_send(stack: Stack) -> None:
    await stack.start()
    params = {
        "max_tokens": 3,
        "detokenize": False,
        "flat_logprobs": False,
        "skip_clone": True,
        "skip_reading_prefix_cache": False,
        "extra_args": {},
        "watermarking": False,
        "thinking_token_budget": None,
        "spaces_between_special_tokens": True,
        "bad_words": [],
    }
    answer = await _generate(stack, sampling_params=params, output_mode="tokens")
    assert answer.status_code == 200, answer.text
    assert (await _generate(stack, output_mode="text")).json()["error"]["param"] == "output_mode"


async def test_generate_streams_the_same_ids(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [*b"yz", EOS_ID]
    await stack.start()
    answer = await _generate(stack, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count('"token_ids"') >= 1
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [1 << 30]}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": 101}}, "sampling_params.temperature"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"bad_words": [" "]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
async def test_generate_refuses_by_field(stack: Stack, fields: dict[str, Any], param: str) -> None:
    await stack.start()
    answer = await _generate(stack, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("asked", "num_top"), [(True, 1), (1, 1), (0, 0)])
async def test_completions_take_logprobs_as_a_number_or_true(
    stack: Stack, asked: object, num_top: int
) -> None:
    await stack.start()
    body = {"model": "base", "prompt": IDS, "max_tokens": 2, "logprobs": asked}
    answer = (await _post(stack, "/v1/completions", body)).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 2
    assert stack.workers[0].requests[0].sampling.logprobs == num_top


async def test_false_asks_for_no_logprobs(stack: Stack) -> None:
    await stack.start()
    body = {"model": "base", "prompt": IDS, "logprobs": False, "prompt_logprobs": False}
    answer = (await _post(stack, "/v1/completions", body)).json()
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["prompt_logprobs"] is None


async def test_prompt_logprobs_belong_to_a_choice_and_in_chat_to_the_response(
    stack: Stack,
) -> None:
    stack.registry.put("upper")
    await stack.start()
    body: dict[str, Any] = {"model": "upper", "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 2}
    answer = await _post(stack, "/v1/completions", body)
    assert answer.headers["x-loraplex-digest"] == digest_of("upper", 1)
    first, *others = answer.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in others] == ["98", "99"]
    assert [len(entry) for entry in others] == [2, 2]
    chat = {"model": "upper", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = await _post(stack, "/v1/chat/completions", chat | {"prompt_logprobs": 0})
    entries = answer.json()["prompt_logprobs"]
    assert entries[0] is None
    assert all(len(entry) == 1 for entry in entries[1:])
    assert {each["rank"] for entry in entries[1:] for each in entry.values()} == {1}
    answer = await _post(stack, "/v1/chat/completions", chat)
    assert answer.json()["prompt_logprobs"] is None


@pytest.mark.parametrize("value", [-1, 257, "many", 1.5])
async def test_prompt_logprobs_out_of_range_are_refused(stack: Stack, value: object) -> None:
    await stack.start()
    body = {"model": "base", "prompt": IDS, "prompt_logprobs": value}
    answer = await _post(stack, "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_prompt_logprobs_are_not_streamed(stack: Stack) -> None:
    await stack.start()
    body = {"model": "base", "prompt": IDS, "prompt_logprobs": 1, "stream": True}
    answer = await _post(stack, "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_tokens_are_shown_by_id_where_asked_for(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [0xC3, 0xA9, EOS_ID]
    await stack.start()
    fields = {"model": "base", "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = await _post(stack, "/v1/completions", fields | {"prompt": [97, 98], "echo": True})
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in (97, 98, 0xC3, 0xA9, EOS_ID)]
    assert logprobs["top_logprobs"][2] == {"token_id:195": -0.5}
    chat = fields | {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    answer = await _post(stack, "/v1/chat/completions", chat)
    first = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "token_id:195"
