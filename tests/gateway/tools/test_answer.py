"""Answers are split into thoughts, text and calls alike however they were cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.reader import MAX_SPACE_CHARS, AnswerReader, Delta
from loraplex_services.gateway.tools.readers import reader_of
from loraplex_services.gateway.tools.schema_values import json_value
from loraplex_services.gateway.tools.tool_use import ToolUse

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    for name, properties in (
        ("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("now", {}),
    )
)
Calls = list[tuple[str, Any]]


def _reader(kind: str) -> AnswerReader | None:
    """`kind`: a format, perhaps with +required or +named."""
    tool_format, _, how = kind.partition("+")
    named = "weather" if how == "named" else ""
    use = ToolUse(TOOLS, must_call=bool(how), named=named, is_parallel=not named)
    return reader_of(ToolFormat(tool_format), use)


def _read(kind: str, parts: Sequence[str], **how: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, text and calls with raw arguments of an answer that came in parts."""
    reply = AnswerParser(
        thinks=how.get("thinks", False),
        is_thinking=how.get("is_thinking", False),
        tools=_reader(kind),
    )
    deltas = [*map(reply.feed, parts), reply.finish()]
    return _summed(deltas)


def _summed(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    found = [call for delta in deltas for call in delta.calls]
    assert [call.index for call in found] == list(range(len(found)))
    calls = [(call.name, call.arguments) for call in found]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


ANSWERS: list[tuple[str, str, str, Calls]] = [
    ("hermes", "plain  text < b ", "plain  text < b ", []),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zü\\"r}"}}\n'
        "</tool_call>",
        "Let me see.",
        [("weather", {"city": 'Zü"r}'})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments": {"a": [1, {"b": null}]}, "name": "weather"}</tool_call> done',
        " done",
        [("now", {}), ("weather", {"a": [1, {"b": None}]})],
    ),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"x\\": 1}"}</tool_call>',
        "",
        [("now", {"x": 1})],
    ),
    (  # the last brace is forgotten
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}</tool_call> done',
        " done",
        [("weather", {"city": "Rome"}), ("now", {})],
    ),
    ("hermes", "a <tool_call> is a mark", "a <tool_call> is a mark", []),
    (
        "hermes",
        "<tool_call>{1}</tool_call>",
        "<tool_call>{1}</tool_call>",
        [],
    ),
    (
        "hermes",
        'say <tool_call> or <tool_call>{"name": "now"}</tool_call>',
        "say <tool_call> or",
        [("now", {})],
    ),
    ("hermes", "ends in <tool_c", "ends in <tool_c", []),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("weather", {"city": "Rome"})],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("now", {}), ("weather", {"city": "Rome"})],
    ),
    ("llama3_json", '{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
    ("llama3_json", ' {"age": 7, "name": "now"}', ' {"age": 7, "name": "now"}', []),
    ("llama3_json", "It is { late }.", "It is { late }.", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("weather", {"city": "Rome"}), ("now", {})],
    ),
    (
        "mistral",
        'Wait.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now{}',
        "Wait.",
        [("weather", {"city": "Rome"}), ("now", {})],
    ),
    ("mistral", "[TOOL_CALLS] is special", "[TOOL_CALLS] is special", []),
    (
        "phi4_mini_json",
        'functools[{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("weather", {"city": "Rome"}), ("now", {})],
    ),
    (
        "phi4_mini_json",
        'So:<|tool_call|>[{"name": "now", "arguments": {"tags": ["a"]}}]<|/tool_call|>',
        "So:",
        [("now", {"tags": ["a"]})],
    ),
    ("phi4_mini_json", "functools is a module", "functools is a module", []),
    (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\n7 <b>\nRome\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("weather", {"city": "7 <b>\nRome", "days": 3})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>"
        "</function>\n</tool_call> done",
        " done",
        [("now", {}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "Well\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>",
        "Well\n</tool_call>",
        [("weather", {"city": "Rome"})],
    ),
    ("qwen3_coder", "x <tool_call> of <function=f>", "x <tool_call> of <function=f>", []),
    ("qwen3_coder", "<tool_call><function=", "<tool_call><function=", []),
    (
        "pythonic",
        "[weather(city='Rome [old]', days=-3), now()]",
        "",
        [("weather", {"city": "Rome [old]", "days": -3}), ("now", {})],
    ),
    (
        "pythonic",
        ' [now(a=[1, (2,)], b={"c": true})]',
        "",
        [("now", {"a": [1, [2]], "b": {"c": True}})],
    ),
    ("pythonic", "[weather\n(city='Rome')]", "", [("weather", {"city": "Rome"})]),
    ("pythonic", "[1] says so", "[1] says so", []),
    ("pythonic", "[launch(now=True)]", "[launch(now=True)]", []),
    ("pythonic", "[now(f())]", "[now(f())]", []),
    ("pythonic", "[now(a=", "[now(a=", []),
    (
        "none+required",
        '[{"name":"weather","parameters":{"city":"Rome"}},\n {"name":"now","parameters":{}} ]',
        "",
        [("weather", {"city": "Rome"}), ("now", {})],
    ),
    ("none+required", '[{"name":"now","parameters":{}},{"name":"wea', "", [("now", {})]),
    ("none+named", '{"city": "Rome"}', "", [("weather", {"city": "Rome"})]),
    ("none+named", '{"city": "Ro', "", []),
    (
        "hermes+required",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "w',
        "",
        [("now", {})],
    ),
    ("hermes+named", '<tool_call>{"name": "weather", "arguments": {"city": "Ro', "", []),
    ("none", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
]


@pytest.mark.parametrize(("kind", "answer", "content", "calls"), ANSWERS)
def test_calls_are_found_and_the_rest_is_text(
    kind: str, answer: str, content: str, calls: Calls
) -> None:
    _, text, found = _read(kind, [answer])
    assert text == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(kind, answer) for kind, answer, _, _ in ANSWERS]),
    st.text(" \n", max_size=2),
    st.sampled_from(
        ["", "<think>hm </think>", "<think>\nwell\n\n</think>\n\n", "<think>", "hm</think>"]
    ),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(0, 200),
)
def test_how_an_answer_was_cut_makes_no_difference(
    answer: tuple[str, str],
    space: str,
    thought: str,
    thinks: bool,
    is_thinking: bool,
    cuts: list[int],
    length: int,
) -> None:
    """Also for answers that end anywhere."""
    kind, text = answer
    text = (space + thought + text)[:length]
    positions = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(positions)]
    how = {"thinks": thinks, "is_thinking": is_thinking}
    complete = _read(kind, [text], **how)
    assert _read(kind, parts, **how) == complete
    assert _read(kind, list(text), **how) == complete


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}", '"name"', ":"]
MARKS += ["functools", "<function=", "<parameter=", "</parameter>", "</function>", ">", "now", "("]
MARKS += ["<|tool_call|>", "<|/tool_call|>", ")", "=", "'"]
MARKS += ['"now"', '"parameters"', ",", "[", "]", ";", " ", "\n", "x", "\\", '"', "<think>"]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([kind for kind in ToolFormat if kind is not ToolFormat.NONE]),
    st.lists(st.sampled_from(MARKS), max_size=14),
)
def test_nonsense_is_read_alike_at_once_and_by_characters(kind: str, marks: list[str]) -> None:
    text = "".join(marks)
    complete = _read(kind, [text])
    assert _read(kind, list(text)) == complete
    if not complete[2]:
        assert complete[1] == text


@pytest.mark.parametrize(
    ("answer", "is_thinking", "reasoning", "content"),
    [
        ("<think>\nhm, 2\n</think>\n\nfour", False, "hm, 2", "four"),
        ("\nhm\n</think>four", True, "hm", "four"),
        ("<think>\n</think>\n\nfour", False, "", "four"),
        ("four </think>", False, "", "four </think>"),
        ("<think>never ends", False, "never ends", ""),
        (" <thin", False, "", " <thin"),
    ],
)
def test_thoughts_are_split_off(
    answer: str, is_thinking: bool, reasoning: str, content: str
) -> None:
    thought, text, _ = _read("none", [answer], thinks=True, is_thinking=is_thinking)
    assert (thought, text) == (reasoning, content)


def test_a_thought_may_end_in_a_call() -> None:
    answer = '<think>call it</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert _read("hermes", [answer], thinks=True) == ("call it", "", [("now", "{}")])


WHOLE_CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Rome"}}',
    "qwen3_coder": "<tool_call><function=weather><parameter=city>Rome</parameter></function>",
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    "pythonic": '[weather(city="Rome")]',
}


@pytest.mark.parametrize("kind", WHOLE_CALLS)
def test_a_call_that_was_cut_anywhere_is_text_and_never_half_a_call(kind: str) -> None:
    complete = WHOLE_CALLS[kind]
    for length in range(1, len(complete)):
        assert _read(kind, [complete[:length]]) == ("", complete[:length], []), length
        assert _read(f"{kind}+required", [complete[:length]]) == ("", "", []), length
    assert _read(kind, [complete]) == ("", "", [("weather", '{"city": "Rome"}')])


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call> It rains.',
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"\nIt rains in Rome.',
        '<tool_call>{"name": "weather", "arguments": {"city" "Rome"}}',
        '<tool_call>{"name": "weather", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments"[: {"city": "Rome"}]}</tool_call>',
        '<tool_call>{"name": "weather", "argument": {"city": "Rome"}\n</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb", "days": 1e999}}</tool_call>',
    ],
)
def test_a_malformed_call_and_what_follows_stay_content(answer: str) -> None:
    assert _read("hermes", [answer]) == ("", answer, [])


def test_line_breaks_within_arguments_are_escaped() -> None:
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>'
    assert _read("hermes", [answer]) == ("", "", [("weather", '{"city": "a\\nb"}')])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", 3),
        ({"$ref": "#/$defs/sizes"}, '["a", 1]', ["a", 1]),
        ({"enum": ["3", "4"]}, "3", "3"),
        ({"type": "object"}, '{"a": "é"}', {"a": "é"}),
        ({}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
    ],
)
def test_plain_values_become_what_the_schema_allows(schema: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"sizes": {"type": "array"}}}
    assert json.loads(json_value(text, "x", parameters)) == value
    assert json.loads(json_value(text, "unknown", parameters)) == text


def test_ids_are_unique_and_fit_the_template_they_go_back_to() -> None:
    reader = _reader("mistral")
    assert reader is not None
    delta = reader.feed('[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b"}]')
    ids = [call.call_id for call in delta.calls if call.call_id]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)


FORMATS = [kind for kind in ToolFormat if _reader(kind.value) is not None]


@pytest.mark.hostile
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("begin", ["", "x", "<think>x</think>"])
def test_white_space_is_held_back_up_to_a_limit(kind: ToolFormat, begin: str) -> None:
    reply = AnswerParser(thinks=True, is_thinking=False, tools=_reader(kind.value))
    reply.feed(begin)
    deltas = [reply.feed(" " * 80) for _ in range(200)]
    num_held = 80 * 200 - sum(len(d.content) + len(d.reasoning) for d in deltas)
    # After a thought, white space is dropped and not held.
    assert num_held <= MAX_SPACE_CHARS or begin.endswith("</think>"), num_held


@pytest.mark.hostile
@pytest.mark.parametrize(("kind", "raw"), [answer[:2] for answer in ANSWERS])
@pytest.mark.parametrize("size", [5, 700])
def test_long_white_space_makes_no_difference_to_how_an_answer_may_be_cut(
    kind: str, raw: str, size: int
) -> None:
    space = " " * (MAX_SPACE_CHARS + 500)
    for text in (space + raw, raw + space + raw, raw + space, raw.replace(" ", space, 1)):
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        for how in ({}, {"thinks": True}, {"is_thinking": True}):
            assert _read(kind, cut, **how) == _read(kind, [text], **how)
