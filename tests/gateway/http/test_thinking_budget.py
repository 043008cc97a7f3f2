"""The field thinking_token_budget of chats, by the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import EOS_ID, byte_tokenizer, tokenizer_files

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think>, and <tool_call> #}"
)
TOOL = {"type": "function", "function": {"name": "now"}}
FIELD = "thinking_token_budget"


def files_with(*tokens: str) -> dict[str, bytes]:
    """A tokenizer with more tokens, from id 259 on."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return {**tokenizer_files(TEMPLATE), "tokenizer.json": tokenizer.to_str().encode()}


@pytest.fixture
async def thinker(stack: Stack) -> Stack:
    """A base whose template opens a thought, with tokens for its marks."""
    stack.workers[0].files = files_with("<think>", "</think>")
    stack.workers[0].script = lambda _: [*b"hm</think>yes", EOS_ID]
    await stack.start()
    return stack


async def ask(stack: Stack, budget: int, **fields: Any) -> Any:
    return await stack.openai().chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=20,
        extra_body={FIELD: budget},
        **fields,
    )


async def test_a_budget_becomes_a_grammar_where_it_can_bind(thinker: Stack) -> None:
    answer = await ask(thinker, 7)
    assert answer.choices[0].message.content == "yes"
    await ask(thinker, 20)
    await ask(thinker, 0, tools=[TOOL])
    limited, free, at_once = (each.grammar.ebnf for each in thinker.workers[0].requests)
    assert limited.startswith("start: part{0,7} <[260]> rest\n")
    assert free == ""
    assert at_once.startswith("start: <[260]> rest\n")


@pytest.mark.parametrize(
    ("budget", "fields"), [(-1, {}), (3, {"response_format": {"type": "json_object"}})]
)
async def test_a_budget_that_cannot_be_is_refused(
    thinker: Stack, budget: int, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(thinker, budget, **fields)
    assert caught.value.param == FIELD


@pytest.mark.parametrize("others", [(), ("<a>", "<b>", "<c>", "<d>", "<think>", "</think>")])
async def test_a_base_without_tokens_for_the_marks_refuses_a_budget(
    stack: Stack, others: tuple[str, ...]
) -> None:
    """The vocabulary of the base ends at 263, and with it what its workers' grammars can name."""
    stack.workers[0].files = files_with(*others)
    await stack.start()
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(stack, 3)
    assert caught.value.param == FIELD
