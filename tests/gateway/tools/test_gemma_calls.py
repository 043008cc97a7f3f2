"""Calls and thoughts as Gemma 4 writes them, also against transformers' own parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from loraplex_services.gateway.text.chat_style import CHANNEL, ToolFormat, detected
from loraplex_services.gateway.tools.answer import AnswerParser
from loraplex_services.gateway.tools.gemma_calls import gemma_call
from loraplex_services.gateway.tools.readers import reader_of
from loraplex_services.gateway.tools.tool_use import ToolUse
from tests.gateway.tiny_tokenizer import byte_tokenizer
from tests.gateway.tools.test_call_grammar import GEMMA_MARKS, Judge

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["old", 7]}, "minItems": 1},
        "inside": {"$ref": "#/$defs/place"},
    },
    "required": ["name"],
}
VISIT = {
    "type": "function",
    "function": {
        "name": "visit",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"$ref": "#/$defs/place"},
                "days": {"type": ["integer", "null"], "minimum": 1},
                "more": {"type": "object"},
            },
            "required": ["place"],
            "$defs": {"place": PLACE},
        },
    },
}
ANYTHING = {"type": "function", "function": {"name": "anything", "parameters": {"type": "object"}}}


def called(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("visit{}", {}),
    (
        'visit{name:<|"|>a {b}, "c": \\n [<|"|>,n:-2.5e3}',
        {"name": 'a {b}, "c": \\n [', "n": -2500.0},
    ),
    (
        'visit{a:[1,<|"|>x<|"|>,[true,{}],null],b:{c:{d:false}}}',
        {"a": [1, "x", [True, {}], None], "b": {"c": {"d": False}}},
    ),
]
LENIENT: list[tuple[str, dict[str, Any]]] = [
    ('visit{"a": "x\\ny", <|"|>b<|"|> : 1 , c:None}', {"a": "x\ny", "b": 1, "c": None}),
    ("visit{city:Old Town,n:007}", {"city": "Old Town", "n": "007"}),
    ("visit{a:[],b:[ 1 , 2 ]}", {"a": [], "b": [1, 2]}),
]
NONE = [
    "",
    "visit",
    "visit{",
    "visit{a}",
    "visit{a:1",
    "visit{a:}",
    "visit{a:1 b:2",
    'visit{a:<|"|>x}',
    "visit{a:1}}",
    "visit{a:1} and more",
    "vi sit{}",
    "visit{,a:1}",
    "visit{a:" + "[" * 5_000,
    "visit{a:" + "[" * 70 + "]" * 70 + "}",
]


@pytest.mark.parametrize(("body", "arguments"), [*CALLS, *LENIENT])
def test_calls_become_json(body: str, arguments: dict[str, Any]) -> None:
    found = gemma_call(f"call:{body}")
    assert found is not None
    assert (found[0], json.loads(found[1])) == ("visit", arguments)


@pytest.mark.parametrize("body", NONE)
def test_what_is_no_call_stays_text(body: str) -> None:
    reader = reader_of(ToolFormat.GEMMA4, ToolUse((VISIT,)))
    assert reader is not None
    text = f"So: {called(body)}"
    deltas = [reader.feed(text), reader.finish()]
    assert ("".join(each.content for each in deltas), reader.num_calls) == (text, 0)


@pytest.mark.long
def test_calls_and_thoughts_are_those_of_transformers() -> None:
    """Long because the import takes seconds."""
    serving = pytest.importorskip("transformers.cli.serving.utils")
    parser = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    template = serving._RESPONSE_TEMPLATE_FALLBACKS[("gemma4",)]
    for body, arguments in CALLS:
        text = f"<|channel>thought\nHm.<channel|>{called(body)}<turn|>"
        told = parser.parse_response(text, template, prefix="<|turn>model\n")
        [call] = told["tool_calls"]
        assert call["function"] == {"name": "visit", "arguments": arguments}
        assert told["reasoning_content"].strip() == "Hm."
        assert read([text.removesuffix("<turn|>")])[0] == "Hm."


def read(parts: list[str]) -> tuple[str, str, int]:
    """Thought, content, and number of calls."""
    tools = reader_of(ToolFormat.GEMMA4, ToolUse((VISIT,)))
    answer = AnswerParser(thinks=True, is_thinking=False, tools=tools, marks=CHANNEL)
    deltas = [*map(answer.feed, parts), answer.finish()]
    reasoning, content = ("".join(getattr(d, k) for d in deltas) for k in ("reasoning", "content"))
    return reasoning, content, answer.num_calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nWell.\n<channel|>Yes.", ("Well.", "Yes.", 0)),
        ("<|channel>thought\n<channel|>Yes.", ("", "Yes.", 0)),
        ("<|channel>thought\nWell.", ("Well.", "", 0)),
        ("<|channel>tho", ("", "<|channel>tho", 0)),
        (f"<|channel>thought\nA.<channel|>{called('visit{}')}", ("A.", "", 1)),
        (called("visit{}") + called("visit{a:1}"), ("", "", 2)),
        (called("visit{}") + "<|tool_call>call:visit{a", ("", "<|tool_call>call:visit{a", 1)),
    ],
)
def test_thoughts_and_calls_are_told_apart_however_they_were_cut(
    text: str, expected: tuple[str, str, int]
) -> None:
    assert read([text]) == read(list(text)) == expected


def test_the_template_tells_the_notation_and_its_thoughts() -> None:
    template = "<|turn>model {{ '<|tool_call>call:' }} <|channel>thought <channel|> <|tool>"
    style = detected(template)
    assert (style.tool_format, style.thinks, style.marks) == (ToolFormat.GEMMA4, True, CHANNEL)
    assert style.has_channels and style.marks_are_special
    without = detected("<|turn>model <|tool_call>call:")
    assert not without.thinks and without.marks_are_special and not without.has_channels


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With marks as special tokens, as Gemma 4 has them, or spelled by bytes."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = byte_tokenizer()
    if request.param:
        made.add_special_tokens([AddedToken(mark, special=True) for mark in GEMMA_MARKS])
    made.save(str(path))
    return path


INSIDE = '{inside:{name:<|"|>b<|"|>},name:<|"|>a<|"|>,tags:[<|"|>old<|"|>,7]}'
FITS: Mapping[str, bool] = {
    'visit{place:{name:<|"|>a<|"|>}}': True,
    'visit{days:3,more:{x:[1,{y:<|"|>z<|"|>}]},place:{name:<|"|><|"|>}}': True,
    f"visit{{days:null,place:{INSIDE}}}": True,
    "visit{}": False,
    "visit{days:3}": False,
    'visit{days:0,place:{name:<|"|>a<|"|>}}': False,
    'visit{place:{name:<|"|>a<|"|>,tags:[]}}': False,
    'visit{place:{name:<|"|>a<|"|>,tags:[8]}}': False,
    'visit{place:{name:<|"|>a<|"|>},days:3}': False,
    'visit{,place:{name:<|"|>a<|"|>}}': False,
    "visit{place:{name:a}}": False,
    'anything{a:-1.5,b:[true,null,<|"|>x<|"|>]}': True,
    "anything{}": True,
    "anything{a:x}": False,
}


def test_required_calls_follow_their_schemas_after_the_thought(tokenizer: Path) -> None:
    use = ToolUse((VISIT, ANYTHING), must_call=True)
    fits = Judge(tokenizer, ToolFormat.GEMMA4, use, thinks=True, marks=CHANNEL)
    for body, expected in FITS.items():
        assert fits(called(body)) == expected, body
        assert fits(f"<|channel>thought\nHm {{}}.<channel|>{called(body)}") == expected, body
    assert fits(called("anything{}") + called("anything{}"))
    assert not fits("") and not fits("Yes.") and not fits("<|channel>thought\nHm.<channel|>")
