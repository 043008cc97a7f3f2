"""Tools through the HTTP API, by the official client: template in, calls out."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import BOS_ID, EOS_ID, tokenizer_files

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>use <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "$defs": {"city": {"type": "string"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def _says(stack: Stack, text: str) -> None:
    stack.workers[0].script = lambda _: [*text.encode(), EOS_ID]


@pytest.fixture
async def talker(stack: Stack) -> Stack:
    """A base that thinks and calls tools."""
    stack.workers[0].files = tokenizer_files(TEMPLATE)
    await stack.start()
    return stack


async def _ask(stack: Stack, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "base", "messages": ASK} | fields
    return await stack.openai().chat.completions.create(**body)


async def test_calls_and_thoughts_come_parsed_out_of_the_answer(talker: Stack) -> None:
    _says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}")
    answer = await _ask(talker, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning == choice.message.reasoning_content == "let me look"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("let me look\n")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert call.id.startswith("call_")
    prompt = bytes(talker.workers[0].requests[0].prompt_ids).decode()
    assert '"description": "of a city"' in prompt


async def test_streamed_deltas_add_up_to_the_whole_answer(talker: Stack) -> None:
    _says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}\n{CALL}")
    complete = (await _ask(talker, tools=[WEATHER], n=2)).choices
    sums = [{"content": "", "reasoning": "", "calls": [], "reasons": []} for _ in complete]
    async for chunk in await _ask(talker, tools=[WEATHER], n=2, stream=True):
        choice = chunk.choices[0]
        total: dict[str, Any] = sums[choice.index]
        total["content"] += choice.delta.content or ""
        total["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                total["calls"].append([call.function.name, ""])
            total["calls"][call.index][1] += call.function.arguments
        total["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    for total, choice in zip(sums, complete, strict=True):
        assert total["content"] == choice.message.content
        assert total["reasoning"] == choice.message.reasoning_content
        calls = choice.message.tool_calls
        assert total["calls"] == [[c.function.name, c.function.arguments] for c in calls]
        assert total["reasons"] == ["tool_calls"] == [choice.finish_reason]


@pytest.mark.parametrize(
    ("says", "num_tokens"),
    [("hm", 2), ("hm, é</think>yes", 6), ("</think>yes", 0), ("<think>hm</think>", 2)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_tokens_of_the_thought(
    talker: Stack, says: str, num_tokens: int, stream: bool
) -> None:
    _says(talker, says)
    if not stream:
        usage = (await _ask(talker, n=2)).usage
    else:
        options = {"include_usage": True}
        answer = await _ask(talker, n=2, stream=True, stream_options=options)
        usage = [chunk async for chunk in answer][-1].usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num_tokens


CHANNELS = {
    "gpt-oss": (
        "{# <|channel|> #}hi",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "é<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "hm\n\né",
        4,
    ),
    "Gemma 4": (
        "{# <|tool_call> <channel|> #}hi",
        "<|channel>thought\nhm<channel|>Yes.",
        "hm",
        3,
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("base", CHANNELS)
async def test_thoughts_on_channels_are_told_apart_and_counted(
    stack: Stack, base: str, stream: bool
) -> None:
    template, says, thought, num_tokens = CHANNELS[base]
    stack.workers[0].files = tokenizer_files(template)
    await stack.start()
    _says(stack, says)
    if stream:
        answer = await _ask(stack, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in answer]
        usage = chunks[-1].usage
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        found = [
            "".join(getattr(d, k, None) or "" for d in deltas) for k in ("reasoning", "content")
        ]
    else:
        complete = await _ask(stack)
        usage, message = complete.usage, complete.choices[0].message
        found = [message.reasoning, message.content]
    assert found == [thought, "Yes."]
    assert usage.completion_tokens_details.reasoning_tokens == num_tokens


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_past_thoughts_reach_the_template_under_either_name(stack: Stack, field: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{% endfor %}"
    stack.workers[0].files = tokenizer_files(template)
    await stack.start()
    await _ask(stack, messages=[{"role": "assistant", "content": "a", field: "hm"}, *ASK])
    assert bytes(stack.workers[0].requests[0].prompt_ids).decode() == "hm|hm|||"


async def test_past_calls_and_their_results_reach_the_template(talker: Stack) -> None:
    _says(talker, "</think>It rains.")
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = await _ask(talker, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(talker.workers[0].requests[0].prompt_ids).decode()
    assert "[assistant]<weather Rome>[tool]rain" in prompt


async def test_templates_get_no_null_fields_and_the_names_of_results(stack: Stack) -> None:
    template = "{% for m in messages %}[{{ m.keys() | sort | join(',') }}|{{ m.name }}]{% endfor %}"
    stack.workers[0].files = tokenizer_files(template)
    await stack.start()
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": "well", "tool_calls": None, "audio": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    await _ask(stack, messages=messages)
    assert bytes(stack.workers[0].requests[0].prompt_ids).decode() == (
        "[content,role|][content,role|][content,role,tool_calls|]"
        "[content,name,role,tool_call_id|now]"
    )


NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


async def test_required_calls_come_in_the_notation_of_the_base_after_its_thought(
    talker: Stack,
) -> None:
    _says(talker, f"the time\n</think>\n\n{NOW_CALL}")
    answer = await _ask(
        talker, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning == "the time"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")
    grammar = talker.workers[0].requests[0].grammar.ebnf
    assert grammar.startswith("start: thought SPACE SPACE calls")
    assert '"#/$defs/0/$defs/city"' in grammar


async def test_a_named_function_is_called_in_that_notation_too(talker: Stack) -> None:
    _says(talker, f"hm</think>{CALL}")
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await _ask(talker, tools=[WEATHER, NOW], tool_choice=choice)
    assert answer.choices[0].finish_reason == "stop"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Zürich"}')
    assert "now" not in talker.workers[0].requests[0].grammar.ebnf


async def test_without_a_notation_a_named_function_gets_the_whole_answer_as_arguments(
    stack: Stack,
) -> None:
    await stack.start()
    _says(stack, '{"city": "Rome"}')
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await _ask(stack, tools=[WEATHER, NOW], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_an_answer_cut_within_a_call_holds_no_half_call(
    talker: Stack, tool_choice: str, stream: bool
) -> None:
    _says(talker, f"hm</think>{NOW_CALL}\n{CALL}"[:-20])
    answer = await _ask(
        talker, tools=[WEATHER, NOW], tool_choice=tool_choice, stream=stream, max_tokens=110
    )
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in answer]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        assert answer.choices[0].finish_reason == "length"
        calls = answer.choices[0].message.tool_calls
        assert ("weather" in (answer.choices[0].message.content or "")) == (tool_choice == "auto")
    assert [(call.function.name, call.function.arguments) for call in calls] == [("now", "{}")]


async def test_with_choice_none_the_model_hears_of_no_tools(talker: Stack) -> None:
    _says(talker, f"</think>{CALL}")
    answer = await _ask(talker, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert "<tools>" not in bytes(talker.workers[0].requests[0].prompt_ids).decode()


async def test_template_options_and_dropped_thoughts(talker: Stack) -> None:
    _says(talker, "hm</think>yes")
    extra: dict[str, Any] = {"include_reasoning": False}
    answer = await _ask(talker, extra_body=extra)
    assert answer.choices[0].message.content == "yes"
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    _says(talker, "yes")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = await _ask(talker, extra_body=extra)
    assert answer.choices[0].message.content == "yes"
    prompt = bytes(talker.workers[0].requests[1].prompt_ids).decode()
    assert prompt.endswith("<think></think>")


async def test_special_tokens_that_open_calls_are_seen(stack: Stack) -> None:
    files = tokenizer_files("[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}")
    files["tokenizer.json"] = files["tokenizer.json"].replace(b"<s>", b"[TOOL_CALLS]")
    stack.workers[0].files = files
    await stack.start()
    stack.workers[0].script = lambda _: [BOS_ID, *b'[{"name": "now", "arguments": {}}]', EOS_ID]
    answer = await _ask(stack, tools=[NOW])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, len(call.id)) == ("now", 9)
    plain = await _ask(stack)
    assert plain.choices[0].message.content == '[{"name": "now", "arguments": {}}]'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        ({"extra_body": {"chat_template_kwargs": "x"}}, "chat_template_kwargs"),
    ],
    ids=str,
)
async def test_bad_tools_are_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    await stack.start()
    with pytest.raises(openai.BadRequestError) as caught:
        await _ask(stack, **fields)
    assert caught.value.param == param


class City(pydantic.BaseModel):
    """of a city"""

    city: str


class Answer(pydantic.BaseModel):
    degrees: int


STRICT = openai.pydantic_function_tool(City, name="weather")


async def test_strict_functions_and_an_answer_format_are_parsed_by_the_official_client(
    talker: Stack,
) -> None:
    """What its `parse` sends by itself; a call comes back as an object of the caller's class."""
    client = talker.openai()
    fields: dict[str, Any] = {"model": "base", "messages": ASK, "tools": [STRICT]}
    _says(talker, f"hm\n</think>\n{CALL}")
    free = await client.chat.completions.parse(**fields)
    (call,) = free.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(city="Zürich")
    assert free.choices[0].message.to_dict()["reasoning_content"] == "hm"
    _says(talker, CALL)
    both = await client.chat.completions.parse(**fields, response_format=Answer)
    (call,) = both.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(city="Zürich")
    _says(talker, '{"degrees": 3}')
    answered = await client.chat.completions.parse(**fields, response_format=Answer)
    assert answered.choices[0].message.parsed == Answer(degrees=3)
    lax, fit, same = [request.grammar.ebnf for request in talker.workers[0].requests]
    assert "TEXT" in lax.partition("call:")[0] and "answer" not in lax
    assert fit == same and fit.startswith("start: answer | call")


async def test_calls_are_free_where_no_function_is_strict(talker: Stack) -> None:
    _says(talker, f"</think>{CALL}")
    await _ask(talker, tools=[WEATHER])
    assert not talker.workers[0].requests[0].HasField("grammar")


async def test_an_answer_format_says_nothing_of_calls_that_must_be_made(talker: Stack) -> None:
    _says(talker, f"hm</think>{CALL}")
    answer = await _ask(
        talker,
        tools=[WEATHER],
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert len(answer.choices[0].message.tool_calls) == 1
    assert "answer" not in talker.workers[0].requests[0].grammar.ebnf


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_only_the_first_counts(talker: Stack, stream: bool) -> None:
    _says(talker, f"</think>{CALL}\n{CALL}")
    answer = await _ask(talker, tools=[WEATHER], parallel_tool_calls=False, stream=stream)
    if not stream:
        assert len(answer.choices[0].message.tool_calls) == 1
        return
    deltas = [d async for chunk in answer for d in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert len([delta for delta in deltas if delta.id]) == 1
