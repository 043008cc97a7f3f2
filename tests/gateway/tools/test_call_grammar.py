"""Grammars of calls within answers, by the workers' matcher, and the readers behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import MAX_GRAMMAR_CHARS
from loraplex_services.gateway.text.chat_style import THINK, ChatStyle, ThoughtMarks, ToolFormat
from loraplex_services.gateway.tools.call_grammar import call_grammar
from loraplex_services.gateway.tools.readers import reader_of
from loraplex_services.gateway.tools.schema_values import json_value
from loraplex_services.gateway.tools.thought_budget import ThoughtBudget
from loraplex_services.gateway.tools.tool_use import ToolUse
from loraplex_services.worker.grammars.compiling import compile_grammar, read_vocabulary
from tests.gateway.tiny_tokenizer import EOS_ID, byte_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
        "sun/rain": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ANSWER = Grammar(json_schema=json.dumps({"type": "object", "required": ["x"]}))
ROME = {"city": 'Rom"a, <é>', "days": 2, "unit": "F", "sun/rain": None}

CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nRom"a, <é>\n</parameter>\n'
    "<parameter=days>\n{days}\n</parameter>\n<parameter=unit>\nF\n</parameter>\n"
    "<parameter=sun/rain>\nnull\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom"a, <é></arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>F</arg_value><arg_key>sun/rain</arg_key><arg_value>null</arg_value>\n</tool_call>"
)
GEMMA = (
    '<|tool_call>call:weather{{city:<|"|>Rom"a, <é><|"|>,days:{days},sun/rain:null,'
    'unit:<|"|>F<|"|>}}<tool_call|>'
)


def _as_json(key: str, days: object) -> str:
    call = {"name": "weather", key: {**ROME, "days": days}}
    return json.dumps(call, ensure_ascii=False)


def _python(days: object) -> str:
    # No identifier, so such an argument cannot be written there.
    return f'weather(city="Rom\\"a, <é>", days={json.dumps(days)}, unit="F")'


def written(tool_format: ToolFormat, days: object = 2) -> str:
    """One call for ROME as a base of that format writes it."""
    return {
        ToolFormat.HERMES: f"<tool_call>\n{_as_json('arguments', days)}\n</tool_call>",
        ToolFormat.LLAMA3_JSON: _as_json("parameters", days),
        ToolFormat.MISTRAL: f"[TOOL_CALLS] [{_as_json('arguments', days)}]",
        ToolFormat.PHI4_MINI: f"functools[{_as_json('arguments', days)}]",
        ToolFormat.QWEN3_CODER: CODER.format(days=days),
        ToolFormat.GLM: GLM.format(days=days),
        ToolFormat.GEMMA4: GEMMA.format(days=days),
        ToolFormat.PYTHONIC: f"[{_python(days)}]",
    }[tool_format]


FORMATS = [each for each in ToolFormat if each not in (ToolFormat.NONE, ToolFormat.HARMONY)]
"""Whose calls stand in text."""
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_call|>", "<|python_tag|>")

GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Marks as tokens of their own, or spelled by bytes."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "bytes.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    special = ("[TOOL_CALLS]", *GEMMA_MARKS)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    tokenizer.save(str(folder / "tokens.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL[1:]])
    tokenizer.save(str(folder / "names.json"))
    return {path.stem: path for path in folder.iterdir()}


class Judge:
    """Says whether a whole answer belongs to a grammar."""

    def __init__(
        self,
        path: Path,
        tool_format: ToolFormat,
        use: ToolUse,
        answer: Grammar | None = None,
        *,
        thinks: bool = False,
        is_thinking: bool = False,
        marks: ThoughtMarks = THINK,
        budget: int | None = None,
    ):
        self._tokenizer = Tokenizer.from_file(str(path))
        size = self._tokenizer.get_vocab_size()
        style = ChatStyle(tool_format, thinks, marks)
        limit = None if budget is None else ThoughtBudget(budget, [EOS_ID])
        grammar = call_grammar(
            style, use, answer, self._added_id, is_thinking=is_thinking, budget=limit
        )
        assert grammar is not None
        vocabulary = read_vocabulary(path, size, [EOS_ID])
        self._matcher = compile_grammar(grammar, vocabulary)

    def __call__(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    def _added_id(self, text: str) -> int | None:
        found = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        return found.get(text)


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_strict_call_fits_its_schema_and_text_is_free(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat, kind: str
) -> None:
    fits = Judge(tokenizers[kind], tool_format, ToolUse((WEATHER, NOW), is_strict=True), None)
    call = written(tool_format)
    assert fits("Hello, <b>you</b>.") and fits("")
    assert fits(call)
    if kind == "tokens":
        assert fits(f"<think>\nhm {{}}\n</think>\n\n{call}")
    assert not fits(written(tool_format, "two"))
    assert not fits(call.replace("weather", "wether"))
    assert not fits(call[: len(call) // 2])


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_with_an_answer_format_an_answer_is_calls_or_that(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat, kind: str
) -> None:
    fits = Judge(tokenizers[kind], tool_format, ToolUse((WEATHER, NOW)), ANSWER)
    assert fits('{"x": 1}') and fits(written(tool_format))
    assert not fits("Hello.") and not fits("") and not fits('{"y": 1}')
    assert not fits(written(tool_format, "two"))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_what_the_grammar_allows_is_read_as_the_same_call(tool_format: ToolFormat) -> None:
    use = ToolUse((WEATHER, NOW), is_strict=True)
    reader = reader_of(tool_format, use)
    assert reader is not None
    deltas = [reader.feed(written(tool_format)), reader.finish()]
    (call,) = [call for delta in deltas for call in delta.calls]
    expected = dict(ROME)
    if tool_format is ToolFormat.PYTHONIC:
        del expected["sun/rain"]
    assert (call.name, json.loads(call.arguments)) == ("weather", expected)
    assert not "".join(delta.content for delta in deltas).strip()


@pytest.mark.parametrize("tool_format", FORMATS)
def test_without_parallel_calls_only_one_is_allowed(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat
) -> None:
    call = written(tool_format)
    two = {
        ToolFormat.LLAMA3_JSON: f"{call}; {call}",
        ToolFormat.MISTRAL: f"{call[:-1]}, {call.partition('[{')[2].join(('{', ''))}",
        ToolFormat.PHI4_MINI: f"{call[:-1]}, {call.partition('[{')[2].join(('{', ''))}",
        ToolFormat.PYTHONIC: f"[{_python(2)}, {_python(2)}]",
    }.get(tool_format, f"{call}\n{call}")
    for is_parallel in (True, False):
        use = ToolUse((WEATHER,), is_strict=True, is_parallel=is_parallel)
        for answer in (None, ANSWER):
            fits = Judge(tokenizers["tokens"], tool_format, use, answer)
            assert fits(call)
            assert fits(two) == is_parallel


def test_mistrals_newer_notation_is_used_where_its_tokens_are(
    tokenizers: Mapping[str, Path],
) -> None:
    fits = Judge(tokenizers["names"], ToolFormat.MISTRAL, ToolUse((WEATHER,), is_strict=True), None)
    arguments = json.dumps(ROME, ensure_ascii=False)
    assert fits(f"[TOOL_CALLS]weather[ARGS]{arguments}")
    assert fits(f"Look:[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{arguments}" * 2)
    assert not fits(f"[TOOL_CALLS]weather[ARGS]{arguments.replace('2', 'true')}")


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_required_calls_are_written_in_the_notation_of_the_base_and_may_end_after_each(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat, kind: str
) -> None:
    fits = Judge(tokenizers[kind], tool_format, ToolUse((WEATHER, NOW), must_call=True))
    call = written(tool_format)
    assert fits(call) and fits(f"{call}\n")
    assert not fits("") and not fits("Hello.") and not fits(f"Hello. {call}")
    assert not fits(f"<think>hm</think>{call}"), "this base does not think"
    assert not fits(written(tool_format, "two")) and not fits(call[: len(call) // 2])


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
@pytest.mark.parametrize("tool_format", [ToolFormat.NONE, *FORMATS])
def test_required_calls_follow_the_thought(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat, kind: str
) -> None:
    path, use = tokenizers[kind], ToolUse((WEATHER, NOW), must_call=True)
    call = f"[{_as_json('parameters', 2)}]" if tool_format == "none" else written(tool_format)
    closed = Judge(path, tool_format, use, thinks=True)
    assert closed(call) and closed(f"<think>\nhm {{ [\n</think>\n\n{call}")
    assert not closed(f"hm</think>{call}") and not closed("<think>hm</think>Hello.")
    opened = Judge(path, tool_format, use, thinks=True, is_thinking=True)
    assert opened(f"hm <b>\n</think>\n\n{call}")
    assert not opened(call) and not opened("hm</think>")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_function_is_called_once_and_no_other_is(
    tokenizers: Mapping[str, Path], tool_format: ToolFormat
) -> None:
    use = ToolUse((WEATHER, NOW), must_call=True, named="weather", is_parallel=False)
    fits = Judge(tokenizers["tokens"], tool_format, use)
    call = written(tool_format)
    assert fits(call)
    assert not fits(f"{call}\n{call}") and not fits(call.replace("weather", "now"))


def test_a_base_without_a_notation_writes_a_list_or_the_arguments(
    tokenizers: Mapping[str, Path],
) -> None:
    path, tools = tokenizers["bytes"], (WEATHER, NOW)
    fits = Judge(path, ToolFormat.NONE, ToolUse(tools, must_call=True))
    call = _as_json("parameters", 2)
    assert fits(f"[{call}]") and fits(f"[{call}, {call}]") and not fits("[]")
    fits = Judge(
        path, ToolFormat.NONE, ToolUse(tools, must_call=True, named="weather", is_parallel=False)
    )
    assert fits(json.dumps(ROME, ensure_ascii=False)) and not fits(f"[{call}]")


def test_nothing_is_constrained_where_nothing_was_asked() -> None:
    def nowhere(_: str) -> None:
        return None

    hermes, none = ChatStyle(ToolFormat.HERMES), ChatStyle(ToolFormat.NONE)
    assert call_grammar(hermes, ToolUse((WEATHER,)), None, nowhere) is None
    assert call_grammar(none, ToolUse((NOW,), is_strict=True), None, nowhere) is None
    assert call_grammar(none, ToolUse((NOW,)), ANSWER, nowhere) is ANSWER


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return {"type": "object", "properties": {"a": schema}}


HOSTILE = {
    "references with 10^9 paths": {
        "properties": {"a": {"$ref": "#/$defs/0"}},
        "$defs": {
            **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 300} for n in range(3)},
            "3": {"const": 1},
        },
    },
    "numbers with 10^9 paths": {
        "properties": {"a": {"$ref": "#/$defs/0"}},
        "$defs": {
            **{str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 300} for n in range(3)},
            "3": {"type": "integer"},
        },
    },
    "many arguments with many alternatives": {
        "properties": {f"a{n}": {"anyOf": [{"$ref": "#/$defs/0"}]} for n in range(1_000)},
        "$defs": {"0": {"anyOf": [*[{"type": "integer"}] * 10_000, {"type": "string"}]}},
    },
    "very many arguments": {"properties": {f"a{n}": {"type": "integer"} for n in range(5_000)}},
    "very many required texts": {
        "properties": {f"a{n}": {"type": "string"} for n in range(20_000)},
        "required": [f"b{n}" for n in range(20_000)],
    },
    "nested deeply": nested(900),
}


@pytest.mark.hostile
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("tool_format", [*FORMATS, ToolFormat.NONE])
def test_schemas_take_time_in_proportion_to_the_longest_grammar(
    tool_format: ToolFormat, schema: dict[str, object]
) -> None:
    """Without a bound, each of these takes minutes or gigabytes, on the event loop."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    use = ToolUse((tool,), must_call=True)
    try:
        grammar = call_grammar(ChatStyle(tool_format), use, None, lambda _: None)
    except InvalidRequest as error:
        assert "schema" in error.message
    else:
        assert grammar is not None and len(grammar.texts[0]) <= 2 * MAX_GRAMMAR_CHARS
    json_value("1", "a", schema)
