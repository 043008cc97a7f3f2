"""Constrained output over HTTP and gRPC, on the demo base, whose tokens are bytes.

The base knows nothing of JSON: whatever it writes here is held by the grammar alone.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from typing import Any

import openai
import pytest

from loraplex_services.common.limits import GRAMMARS
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
PROMPT = "hello="


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.http + "/v1", api_key="ignored", max_retries=0)


def test_a_strict_json_schema_holds_for_every_sampled_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BASE_ID,
        messages=[{"role": "user", "content": "hello"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
        },
        temperature=1.5,
        seed=3,
        n=4,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        thing = json.loads(choice.message.content or "")
        assert set(thing) == {"name", "size", "count"}
        assert len(thing["name"]) <= 8 and thing["size"] in ("small", "large")
        assert 0 <= thing["count"] <= 99


def test_a_stream_of_constrained_text_is_the_whole_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": BASE_ID,
        "prompt": PROMPT,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 64,
        "extra_body": {"guided_regex": "[A-Z]{3}-[0-9]{4}"},
    }
    whole = client.completions.create(**fields).choices[0].text
    chunks = list(client.completions.create(stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert re.fullmatch("[A-Z]{3}-[0-9]{4}", whole)


LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
UNUSED = {
    **dict.fromkeys(("json", "regex", "whitespace_pattern", "structural_tag")),
    **dict.fromkeys(("disable_fallback", "disable_any_whitespace"), False),
    "disable_additional_properties": False,
}
"""What vLLM's `StructuredOutputsParams` sends for the fields that its user did not set."""


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["positive", "negative", "no opinion"]}, "positive|negative|no opinion"),
        ({"guided_grammar": 'start: ("ab" | "cd")+ "!"'}, "(ab|cd)+!"),
        (
            {"structured_outputs": {"grammar": 'root ::= pair+ "!"\npair ::= "ab" | "cd"'}},
            "(ab|cd)+!",
        ),
        ({"structured_outputs": {"regex": "x{2,3}y"}}, "x{2,3}y"),
        ({"structured_outputs": {"choice": ["é", "日本"]}}, "é|日本"),
        ({"guided_json": {"enum": ["left", "right"]}}, '"(left|right)"'),
        ({"structured_outputs": {"json": '{"type":"boolean"}'}}, "true|false"),
        (
            {"structured_outputs": {"json": LIST, "disable_any_whitespace": True}},
            r"\[(true|false),(true|false)\]",
        ),
        (
            {"structured_outputs": {"json": LIST, "whitespace_pattern": "_"}},
            r"_?\[_?(true|false)_?,_?(true|false)_?\]",
        ),
        ({"structured_outputs": UNUSED | {"choice": ["yes", "no"]}}, "yes|no"),
    ],
)
def test_vllms_fields_constrain_completions(
    stack: Stack, fields: dict[str, Any], pattern: str
) -> None:
    answer = stack.complete(BASE_ID, PROMPT, temperature=1.0, seed=2, **fields)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" or len(choice["text"]) >= 32
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_an_adapter_runs_under_a_grammar_too(stack: Stack) -> None:
    answer = stack.complete(ADAPTERS[0].name, PROMPT, guided_regex="[0-9]{6}")
    assert re.fullmatch("[0-9]{6}", answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_json": {"type": "colour"}}, "guided_json", "Invalid type"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_choice": []}, "guided_choice", "at least one option"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be text"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_field_and_the_reason(
    stack: Stack, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": BASE_ID, "prompt": PROMPT, "max_tokens": 8, **fields}
    for stream in (False, True):
        status, answer = stack.post("/v1/completions", {**body, "stream": stream})
        assert status == 400, answer
        assert answer["error"]["param"] == param
        assert said in answer["error"]["message"]


def test_a_grammar_that_would_crash_its_reader_is_refused_and_others_go_on(stack: Stack) -> None:
    rules = [f'x{i}: "a" x{i + 1} "b"' for i in range(3500)]
    hostile = "\n".join(["start: x0", *rules, 'x3500: "c"'])
    body = {"model": BASE_ID, "prompt": PROMPT, "guided_grammar": hostile}
    status, answer = stack.post("/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "guided_grammar", answer
    again = stack.complete(BASE_ID, PROMPT, guided_choice=["fine"])
    assert again["choices"][0]["text"] == "fine"


@pytest.mark.hostile
def test_grammars_of_clients_that_left_do_not_hold_up_other_requests(stack: Stack) -> None:
    host, _, port = stack.http.removeprefix("http://").rpartition(":")
    for number in range(8):
        schema = {"type": "integer", "multipleOf": 900_001 + 2 * number}
        body = {"model": BASE_ID, "prompt": PROMPT, "guided_json": schema}
        left = http.client.HTTPConnection(host, int(port))
        left.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        time.sleep(0.1)  # it reaches the worker
        left.close()
    begin_s = time.monotonic()
    answer = stack.complete(BASE_ID, PROMPT, guided_choice=["late?"])
    assert answer["choices"][0]["text"] == "late?"
    assert time.monotonic() - begin_s < 4 * GRAMMARS.timeout_s, "all eight were compiled first"
