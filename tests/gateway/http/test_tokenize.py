"""/tokenize and /detokenize answer as vLLM's do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from asyncio import to_thread
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import BOS_ID, CHAT_TEMPLATE


async def _post(stack: Stack, path: str, **body: Any) -> tuple[int, Any]:
    def post() -> tuple[int, Any]:
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(stack.url + path, data=data, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await to_thread(post)


async def test_a_text_becomes_tokens_and_text_again(stack: Stack) -> None:
    stack.registry.put("upper")
    await stack.start()
    status, answer = await _post(stack, "/tokenize", model="upper", prompt="hé")
    assert status == 200
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS_ID, *"hé".encode()],
        "token_strs": None,
    }
    _, back = await _post(stack, "/detokenize", model="upper", tokens=answer["tokens"])
    assert back == {"prompt": "<s>hé"}
    _, bare = await _post(
        stack, "/tokenize", prompt="h", add_special_tokens=False, return_token_strs=True
    )
    assert (bare["tokens"], bare["token_strs"]) == ([104], ["h"])


async def test_a_conversation_becomes_the_tokens_that_a_chat_would_send(stack: Stack) -> None:
    await stack.start()
    messages = [{"role": "user", "content": "hi"}]
    _, answer = await _post(stack, "/tokenize", model="base", messages=messages)
    assert bytes(answer["tokens"]) == b"[user]hi[assistant]"
    _, answer = await _post(
        stack, "/tokenize", model="base", messages=messages, add_generation_prompt=False
    )
    assert bytes(answer["tokens"]) == b"[user]hi"
    assert stack.workers[0].requests == []


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "frobnicate": 1}, 400, "frobnicate"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, 400, "tokens"),
        ("/tokenize", {"prompt": "a" * (512 * 128 + 1)}, 400, "prompt"),
    ],
    ids=str,
)
async def test_bad_bodies_are_named(
    stack: Stack, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    await stack.start()
    got, answer = await _post(stack, path, **body)
    assert (got, answer["error"]["param"]) == (status, param)


async def test_the_special_tokens_and_the_template_of_the_first_base_are_told(stack: Stack) -> None:
    await stack.start()
    async with httpx.AsyncClient(base_url=stack.url) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert info == {
        "model_max_length": 512,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
