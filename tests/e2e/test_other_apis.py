"""Responses and Messages on a real engine, by the official clients."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack

NAME = ADAPTERS[0].name if ADAPTERS else ""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def responses(stack: Stack) -> Any:
    return openai.OpenAI(base_url=stack.http + "/v1", api_key="none", max_retries=0).responses


@pytest.fixture
def messages(stack: Stack) -> Any:
    import anthropic  # thousands of modules, for the process that runs this alone

    return anthropic.Anthropic(base_url=stack.http, api_key="none", max_retries=0).messages


def test_an_adapter_answers_alike_in_all_apis(responses: Any, messages: Any) -> None:
    prompt, want = held_out(NAME, 1, seed=12)[0]
    text = prompt.removesuffix("=")
    complete = responses.create(model=NAME, input=text, temperature=0)
    assert (complete.output_text, complete.status) == (want, "completed")
    with responses.stream(model=NAME, input=text, temperature=0) as stream:
        assert stream.get_final_response().output_text == want
    ask: dict[str, Any] = {"model": NAME, "max_tokens": 64, "extra_body": {"temperature": 0}}
    ask["messages"] = [{"role": "user", "content": text}]
    answer = messages.create(**ask)
    assert (answer.content[0].text, answer.stop_reason) == (want, "end_turn")
    with messages.stream(**ask) as stream:
        assert stream.get_final_text() == want
    del ask["max_tokens"], ask["extra_body"]
    assert messages.count_tokens(**ask).input_tokens == complete.usage.input_tokens


def test_usage_says_what_the_prefix_cache_held(responses: Any, messages: Any) -> None:
    text = "which prefix is cached? " * 8
    first = responses.create(model=BASE_ID, input=text, max_output_tokens=4).usage
    again = responses.create(model=BASE_ID, input=text, max_output_tokens=4).usage
    cached = again.input_tokens_details.cached_tokens
    assert first.input_tokens_details.cached_tokens == 0 < cached < again.input_tokens
    ask = [{"role": "user", "content": text}]
    usage = messages.create(model=BASE_ID, max_tokens=4, messages=ask).usage
    assert usage.cache_read_input_tokens == cached
    assert usage.input_tokens == again.input_tokens - cached


def test_calls_and_texts_fit_their_schemas(responses: Any, messages: Any) -> None:
    tool: dict[str, Any] = {"name": "weather"}
    answer = responses.create(
        model=BASE_ID,
        input="weather",
        tools=[{"type": "function", **tool, "parameters": SCHEMA}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=200,
    )
    assert json.loads(answer.output[-1].arguments)["city"] in ("Rome", "Oslo")
    ask: dict[str, Any] = {"model": BASE_ID, "max_tokens": 200}
    ask["messages"] = [{"role": "user", "content": "weather"}]
    called = messages.create(
        **ask,
        tools=[{**tool, "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert called.content[-1].input["city"] in ("Rome", "Oslo")
    assert called.stop_reason == "tool_use"
    output_config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    text = messages.create(**ask, output_config=output_config).content[0].text
    assert json.loads(text)["city"] in ("Rome", "Oslo")
