"""The official client, unchanged, against the gateway."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack

NAME = ADAPTERS[0].name if ADAPTERS else ""


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.http + "/v1", api_key="ignored", max_retries=0)


def test_models_list_the_base_first_then_the_adapters(client: openai.OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert ids[0] == BASE_ID
    assert {path.name for path in ADAPTERS} <= set(ids)


def test_a_stream_concatenates_to_the_whole_answer(client: openai.OpenAI) -> None:
    prompt, want = held_out(NAME, 1, seed=11)[0]
    chunks = list(
        client.completions.create(
            model=NAME,
            prompt=prompt,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == want
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_chat_stream_ends_with_a_finish_reason(client: openai.OpenAI) -> None:
    prompt, want = held_out(NAME, 1, seed=12)[0]
    messages = [{"role": "user", "content": prompt.removesuffix("=")}]
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
    )
    chunks: list[Any] = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == want
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_unknown_model_is_a_not_found_error_with_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-adapter", prompt="a")
    assert caught.value.code == "model_not_found"


def test_seeded_sampling_repeats_itself(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        answer = client.completions.create(
            model=BASE_ID,
            prompt="hello=",
            temperature=2.0,
            seed=seed,
            max_tokens=40,
            n=3,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first
    assert len(set(first)) > 1


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_made_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    """No chat template and no model that was trained for it is needed: a grammar sees to it."""
    tools = [WEATHER] if choice == "required" else [NOW, WEATHER]
    asked: dict[str, Any] = {
        "model": BASE_ID,
        "messages": [{"role": "user", "content": "weather"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 7,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    arguments = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            arguments += (delta.function.arguments or "") if delta.function else ""
    assert arguments == call.function.arguments


@pytest.mark.long
def test_the_node_client_works_unchanged(stack: Stack) -> None:
    """Where node finds the package `openai`: npm install openai, or NODE_PATH."""
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", "require.resolve('openai')"]).returncode:
        pytest.skip("node or its package openai is missing: npm install openai")
    script = Path(__file__).with_name("node_client.cjs")
    done = subprocess.run(
        [node, str(script), stack.http, NAME], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["models"][0] == BASE_ID
    assert result["streamed"] == result["whole"] != ""
    assert result["status"] == 404 and result["code"] == "model_not_found"
