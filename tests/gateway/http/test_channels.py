"""Chats with a base that answers on channels, as gpt-oss does, by the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import EOS_ID, byte_tokenizer, tokenizer_files

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|message|>{{ m.content or '' }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather json<|message|>{"city": "Rome"}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """With marks that are special tokens, which plain text leaves out."""
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


@pytest.fixture
async def oss(stack: Stack, tokenizer: Tokenizer) -> Stack:
    files = tokenizer_files(TEMPLATE) | {"tokenizer.json": tokenizer.to_str().encode()}
    stack.workers[0].files = files
    await stack.start()
    return stack


async def ask(stack: Stack, tokenizer: Tokenizer, says: str, **fields: Any) -> Any:
    ids = tokenizer.encode(says, add_special_tokens=False).ids
    stack.workers[0].script = lambda _: [*ids, EOS_ID]
    body: dict[str, Any] = {"model": "base", "messages": ASK} | fields
    return await stack.openai().chat.completions.create(**body)


async def test_channels_become_reasoning_and_content_without_tools(
    oss: Stack, tokenizer: Tokenizer
) -> None:
    says = f"{THOUGHT}<|channel|>final<|message|>Rain."
    message = (await ask(oss, tokenizer, says)).choices[0].message
    assert (message.reasoning, message.content) == ("Look it up.", "Rain.")
    stream = await ask(oss, tokenizer, says, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Rain."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Look it up."


async def test_calls_come_out_and_their_thought_goes_back_in(
    oss: Stack, tokenizer: Tokenizer
) -> None:
    choice = (await ask(oss, tokenizer, THOUGHT + CALL, tools=[WEATHER])).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Rome"},
    )
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASK, choice.message.to_dict(), answer]
    await ask(oss, tokenizer, "<|channel|>final<|message|>Rain.", messages=messages)
    prompt = tokenizer.decode(oss.workers[0].requests[-1].prompt_ids, skip_special_tokens=False)
    assert "assistant<|channel|>analysis<|message|>Look it up.<|end|>" in prompt


async def test_completions_keep_the_text_as_it_is(oss: Stack, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False).ids
    oss.workers[0].script = lambda _: [*ids, EOS_ID]
    done = await oss.openai().completions.create(model="base", prompt="hi", max_tokens=99)
    assert done.choices[0].text == "analysisLook it up.assistant"
