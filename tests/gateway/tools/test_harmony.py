"""Answers of gpt-oss are read by their channels however they were cut, and kept to schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.readers import reader_of
from loraplex_services.gateway.tools.tool_use import ToolUse
from tests.gateway.tiny_tokenizer import byte_tokenizer
from tests.gateway.tools.test_call_grammar import ANSWER, NOW, WEATHER, Judge

THOUGHT = "<|channel|>analysis<|message|>User asks for Rome.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It rains. "
ARGUMENTS = '{"city":"Rome","days":2}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
IN_ROLE = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}"
REMARK = "<|channel|>commentary<|message|>I look it up.<|end|>"
WEATHER_CALL = ("weather", json.loads(ARGUMENTS))
ANSWERS = [
    (f"{THOUGHT}{NEXT}{FINAL}", "User asks for Rome.", "It rains. ", []),
    (f"{THOUGHT}{NEXT}{FINAL}<|return|>", "User asks for Rome.", "It rains.", []),
    (f"{THOUGHT}{NEXT}{CALL}<|call|>", "User asks for Rome.", "", [WEATHER_CALL]),
    (f"{THOUGHT}{NEXT}{IN_ROLE}", "User asks for Rome.", "", [WEATHER_CALL]),
    (f"{REMARK}{NEXT}{CALL}", "", "I look it up.", [WEATHER_CALL]),
    (f"{REMARK}{NEXT}{FINAL}", "", "I look it up.\n\nIt rains. ", []),
    (f"{THOUGHT}{NEXT}{THOUGHT}", "User asks for Rome.\n\nUser asks for Rome.", "", []),
    (f"{CALL}<|call|>{NEXT}{CALL}", "", "", [WEATHER_CALL, WEATHER_CALL]),
    ("<|channel|>commentary to=functions.now<|message|>", "", "", [("now", {})]),
    (CALL[:-1], "", ARGUMENTS[:-1], []),
    ("<|channel|>analysis<|message|>cut", "cut", "", []),
    ("<|channel|>analysis<|message|>x<|en", "x<|en", "", []),
    (f"{THOUGHT}{NEXT}<|channel|>fin", "User asks for Rome.", "", []),
    ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "print(1)", "", []),
    ('{"x": 1}', "", '{"x": 1}', []),
    ("Plain <|end|> text.", "", "Plain <|end|> text.", []),
    ("<|chan", "", "<|chan", []),
    ("", "", "", []),
]


def read(parts: list[str], use: ToolUse) -> tuple[str, str, list[tuple[str, object]]]:
    tools = reader_of(ToolFormat.HARMONY, use)
    parser = AnswerParser(thinks=False, is_thinking=False, tools=tools)
    deltas = [*map(parser.feed, parts), parser.finish()]
    found = [(c.name, json.loads(c.arguments)) for delta in deltas for c in delta.calls]
    assert parser.num_calls == len(found)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), found


@pytest.mark.parametrize(("answer", "reasoning", "content", "calls"), ANSWERS)
def test_channels_are_told_apart(
    answer: str, reasoning: str, content: str, calls: list[tuple[str, object]]
) -> None:
    use = ToolUse((WEATHER, NOW))
    assert read([answer], use) == (reasoning, content, calls)
    assert read(list(answer), use) == (reasoning, content, calls)


@given(answer=st.sampled_from([answer for answer, *_ in ANSWERS]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_answer_is_the_same_however_it_is_cut(answer: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(answer)))
    use = ToolUse((WEATHER,))
    assert read([answer[:cut], answer[cut:]], use) == read([answer], use)


def test_without_tools_a_call_is_content() -> None:
    assert read([f"{THOUGHT}{NEXT}{CALL}"], ToolUse()) == ("User asks for Rome.", ARGUMENTS, [])


def test_required_calls_keep_their_thought() -> None:
    use = ToolUse((WEATHER,), must_call=True)
    answer = f"{THOUGHT}{NEXT}{REMARK}{NEXT}{CALL}"
    assert read([answer], use) == ("User asks for Rome.", "", [WEATHER_CALL])


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With marks as special tokens, as gpt-oss has them, or spelled by bytes."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = byte_tokenizer()
    if request.param:
        names = ("start", "channel", "message", "end", "constrain", "call", "return")
        made.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    made.save(str(path))
    return path


WRONG = CALL.replace("2", '"two"')


def test_a_grammar_keeps_calls_to_their_schemas(tokenizer: Path) -> None:
    use = ToolUse((WEATHER, NOW), is_strict=True)
    fits = Judge(tokenizer, ToolFormat.HARMONY, use)
    for before in ("", f"{THOUGHT}{NEXT}", f"{THOUGHT}{NEXT}{REMARK}{NEXT}"):
        assert fits(before + CALL) and fits(before + IN_ROLE) and fits(before + FINAL)
    if fits("<|channel|>"):  # Where marks are no tokens, they are text as well.
        return
    assert not fits(WRONG) and not fits(CALL.replace("weather", "wether"))


def test_a_grammar_of_required_calls_allows_nothing_else(tokenizer: Path) -> None:
    fits = Judge(tokenizer, ToolFormat.HARMONY, ToolUse((WEATHER, NOW), must_call=True))
    assert fits(CALL) and fits(f"{THOUGHT}{NEXT}{CALL}")
    assert not fits(FINAL) and not fits("") and not fits(WRONG) and not fits(THOUGHT)


def test_with_an_answer_format_an_answer_is_a_call_or_that(tokenizer: Path) -> None:
    fits = Judge(tokenizer, ToolFormat.HARMONY, ToolUse((WEATHER, NOW)), ANSWER)
    final = "<|channel|>final<|message|>"
    assert fits(f'{final}{{"x": 1}}') and fits(f"{THOUGHT}{NEXT}{CALL}")
    assert not fits(FINAL) and not fits(f'{final}{{"y": 1}}') and not fits(WRONG)


@pytest.mark.parametrize("answer", [answer for answer, *_ in ANSWERS])
def test_thoughts_are_where_the_reader_says(answer: str) -> None:
    """The tokens of these places are counted as those of thoughts."""
    for parts in ([answer], list(answer)):
        tools = reader_of(ToolFormat.HARMONY, ToolUse((WEATHER, NOW)))
        assert tools is not None
        deltas = [*map(tools.feed, parts), tools.finish()]
        found = "".join(answer[begin:end] for delta in deltas for begin, end in delta.thoughts)
        assert found == "".join(delta.reasoning for delta in deltas).replace("\n\n", "")
