"""Calls of LoRAX, TGI, SGLang and vLLM that are not served or need a setting. Wrong methods."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.gateway.conftest import Stack


@pytest.mark.parametrize(
    ("path", "status", "instead"),
    [
        ("/", 405, "use /v1/completions"),
        ("/generate", 404, "use /v1/completions"),
        ("/generate_stream", 404, "use /v1/completions"),
        ("/v1/load_lora_adapter", 404, "set LORAPLEX_LORA_ROOT"),
        ("/unload_lora_adapter", 404, "set LORAPLEX_LORA_ROOT"),
    ],
)
async def test_calls_of_other_servers_for_adapters_say_what_to_do_instead(
    stack: Stack, path: str, status: int, instead: str
) -> None:
    await stack.start()
    with pytest.raises(openai.APIStatusError, match=instead) as caught:
        await stack.openai().post(f"{stack.url}{path}", body={}, cast_to=object)
    assert caught.value.status_code == status


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models/base", "GET, HEAD"),
        ("GET", "/v1/messages", "POST"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_answered_with_the_ones_of_the_path(
    stack: Stack, method: str, path: str, allow: str
) -> None:
    await stack.start()
    async with httpx.AsyncClient(base_url=stack.url) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    instead = allow.removesuffix(", HEAD").replace(", ", " or ")
    assert answer.json()["error"]["message"] == f"{path} does not take {method}: use {instead}"
    assert answer.json()["error"]["type"] == "invalid_request_error"
