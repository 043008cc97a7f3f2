"""Calls of LoRAX, TGI, SGLang and vLLM that are not served, or only with a setting."""

from __future__ import annotations

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
