"""Thoughts that end after a number of tokens, by the workers' matcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.errors import Unsupported
from loraplex_services.gateway.text.chat_style import CHANNEL, ThoughtMarks, ToolFormat
from loraplex_services.gateway.tools.tool_use import ToolUse
from tests.gateway.tools.test_call_grammar import FORMATS, NOW, WEATHER, Judge, written
from tests.gateway.tools.test_call_grammar import tokenizers as tokenizers

THINK = ThoughtMarks("<think>", "</think>")
HERMES = ToolFormat.HERMES


@pytest.mark.parametrize("marks", [THINK, CHANNEL], ids=["think", "channel"])
def test_a_thought_that_the_answer_opens_ends_at_its_budget(
    tokenizers: Mapping[str, Path], marks: ThoughtMarks
) -> None:
    path = tokenizers["tokens"]
    fits = Judge(path, HERMES, ToolUse(), thinks=True, marks=marks, budget=3)
    for thought in ("", "a", "abc", "aé", "<tool_call>"):
        assert fits(f"{marks.opens}{thought}{marks.closes}and a <tool_call> afterwards")
    for thought in ("abcd", "éé", "a</s>"):
        assert not fits(f"{marks.opens}{thought}{marks.closes}")
    assert fits("Text without a thought, of any length.") and fits("")
    assert not fits(f"A thought {marks.opens} in the middle")


@pytest.mark.parametrize("budget", [0, 2])
def test_a_thought_that_the_prompt_opened_ends_at_its_budget(
    tokenizers: Mapping[str, Path], budget: int
) -> None:
    path = tokenizers["tokens"]
    fits = Judge(path, HERMES, ToolUse(), thinks=True, is_thinking=True, budget=budget)
    assert fits("ab"[:budget] + "</think>anything")
    assert not fits("abc"[: budget + 1] + "</think>anything")


@pytest.mark.parametrize("must_call", [True, False], ids=["required", "strict"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_constrained_after_a_thought_within_its_budget(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat, must_call: bool
) -> None:
    use = ToolUse((WEATHER, NOW), must_call=must_call, is_strict=True)
    fits = Judge(tokenizers["tokens"], tool_format, use, thinks=True, budget=3)
    call = written(tool_format)
    assert fits(f"<think>abc</think>{call}") and fits(call)
    assert not fits(f"<think>abc</think>{written(tool_format, 'two')}")
    if must_call:
        assert not fits(f"<think>abcd</think>{call}")


@pytest.mark.parametrize(("kind", "thinks"), [("bytes", True), ("tokens", False)])
def test_a_base_without_tokens_for_the_marks_has_no_budget(
    tokenizers: Mapping[str, Path], kind: str, thinks: bool
) -> None:
    with pytest.raises(Unsupported) as caught:
        Judge(tokenizers[kind], HERMES, ToolUse(), thinks=thinks, budget=3)
    assert caught.value.violations[0].field == "thinking_token_budget"
