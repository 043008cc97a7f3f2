"""litellm, unchanged, against the gateway. No dependency of ours: pip install litellm mcp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.stack import BASE_ID, Stack
from tests.e2e.test_openai_client import WEATHER

pytestmark = pytest.mark.long
MESSAGES = [{"role": "user", "content": "kolima 48"}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("mcp", reason="litellm's tools need it: pip install mcp")
    return pytest.importorskip("litellm", reason="pip install litellm")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chats_streams_calls_tools_and_embeds(
    stack: Stack, litellm: Any, provider: str
) -> None:
    line = {"api_base": f"{stack.http}/v1", "api_key": "ignored", "max_retries": 0}
    asked = {"model": f"{provider}/upper", "messages": MESSAGES, "temperature": 0, **line}
    assert litellm.completion(**asked).choices[0].message.content == "KOLIMA 48"
    chunks = list(litellm.completion(**asked, stream=True))
    complete = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert complete.choices[0].message.content == "KOLIMA 48"
    made = asked | {"model": f"{provider}/{BASE_ID}", "tools": [WEATHER], "seed": 7}
    chunks = list(litellm.completion(**made, tool_choice="required", max_tokens=200, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message.tool_calls
    assert call.function.name == "weather" and '"city"' in call.function.arguments
    vectors = litellm.embedding(model=f"{provider}/{BASE_ID}", input=["a", "b"], **line).data
    assert len({len(vector["embedding"]) for vector in vectors}) == 1


def test_litellm_tells_our_refusals_apart(stack: Stack, litellm: Any) -> None:
    line = {"api_base": f"{stack.http}/v1", "api_key": "ignored", "max_retries": 0}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/nobody", messages=MESSAGES, **line)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model="openai/upper", messages=MESSAGES, temperature=-1, **line)
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "a" * 5000}]
        litellm.completion(model="openai/upper", messages=long, **line)
