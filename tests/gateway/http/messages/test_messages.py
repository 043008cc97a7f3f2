"""The Messages API through the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from loraplex.v1 import registry_pb2
from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.talking import CALL, PARAMETERS, prompt_of, says, started_talker
from tests.gateway.scripted_worker import endless

if TYPE_CHECKING:
    import anthropic

WEATHER: dict[str, Any] = {"name": "weather", "input_schema": PARAMETERS}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(autouse=True, scope="module")
def official_client() -> None:
    """These are thousands of modules, and each process of a run would load them to collect."""
    global anthropic
    import anthropic


@pytest.fixture
async def talker(stack: Stack) -> Stack:
    return await started_talker(stack)


def _client(stack: Stack, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stack.url, api_key=key, max_retries=0)


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    ask = [{"role": "user", "content": "hi"}]
    return {"model": "base", "max_tokens": 200, "messages": ask} | fields


async def _ask(stack: Stack, **fields: Any) -> Any:
    async with _client(stack) as client:
        return await client.messages.create(**_body(fields))


async def _events(stack: Stack, **fields: Any) -> list[Any]:
    async with _client(stack) as client:
        stream = await client.messages.create(**_body(fields), stream=True)
        return [event async for event in stream]


async def _refusal(stack: Stack, **fields: Any) -> anthropic.APIStatusError:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await _ask(stack, **fields)
    assert stack.workers[0].requests == []
    return caught.value


async def test_a_message_has_the_fields_and_types_of_the_official_client(talker: Stack) -> None:
    says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}")
    answer = await _ask(talker, tools=[WEATHER], thinking=THINKING, system="Be brief.")
    checked = anthropic.types.Message.model_validate(answer.to_dict())
    thought, text, call = checked.content
    assert thought.type == "thinking" and thought.thinking == "let me look"
    assert thought.signature.startswith("sha256:")
    assert text.type == "text" and text.text == "One moment."
    assert call.type == "tool_use" and call.input == {"city": "Zürich"}
    assert (checked.stop_reason, checked.stop_sequence) == ("tool_use", None)
    assert checked.usage.output_tokens_details is not None
    assert checked.usage.output_tokens_details.thinking_tokens == len("let me look\n")
    prompt = prompt_of(talker)
    assert "[system]Be brief.[user]hi[assistant]<think>" in prompt
    assert checked.usage.input_tokens == len(talker.workers[0].requests[0].prompt_ids)
    assert answer._request_id


async def test_streamed_events_are_those_of_the_official_client_and_add_up(talker: Stack) -> None:
    says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}\n{CALL}")
    asked: dict[str, Any] = {"tools": [WEATHER], "thinking": THINKING}
    complete = await _ask(talker, **asked)
    events = await _events(talker, **asked)
    known: Any = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in events:
        known.validate_python(event.to_dict())
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    seen = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    assert seen[1:-2] == block * 4
    assert events[0].message.usage.output_tokens == 0
    async with _client(talker) as client, client.messages.stream(**_body(asked)) as stream:
        final = await stream.get_final_message()
    assert [_without_id(each) for each in final.content] == [
        _without_id(each) for each in complete.content
    ]
    assert (final.stop_reason, final.usage) == (complete.stop_reason, complete.usage)


async def test_there_is_no_thought_unless_it_is_asked_for(talker: Stack) -> None:
    says(talker, "Yes.")
    answer = await _ask(talker)
    assert [block.type for block in answer.content] == ["text"]
    assert prompt_of(talker).endswith("[assistant]<think></think>")
    await _ask(talker, thinking={"type": "disabled"})
    assert prompt_of(talker).endswith("[assistant]<think></think>")
    await _ask(talker, thinking={"type": "adaptive"})
    assert prompt_of(talker).endswith("[assistant]<think>\n")
    await _ask(talker, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert prompt_of(talker).endswith("[assistant]<think>\n")


async def test_a_whole_conversation_reaches_the_template(talker: Stack) -> None:
    says(talker, f"hm</think>Wait.\n{CALL}")
    first = await _ask(talker, tools=[WEATHER], thinking=THINKING)
    says(talker, "</think>It rains.")
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": "rain"}],
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    system = [{"type": "text", "text": "One.", **cached}, {"type": "text", "text": "Two."}]
    answer = await _ask(talker, messages=messages, system=system, tools=[WEATHER | cached])
    assert answer.stop_reason == "end_turn"
    assert (
        "[system]One.\nTwo.[user]hi\nthere[assistant]<think>hm</think>Wait.<weather Zürich>"
        "[tool]rain[user]so?[assistant]" in prompt_of(talker)
    )


async def test_a_prefilled_answer_is_continued(stack: Stack) -> None:
    await stack.start()
    ask = {"role": "user", "content": "hi"}
    await _ask(stack, messages=[ask, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(stack) == "[user]hi[assistant]Well,"


@pytest.mark.parametrize(
    ("fields", "reason", "matched", "text"),
    [
        ({"max_tokens": 4}, "max_tokens", None, "abcd"),
        ({"stop_sequences": ["efg"]}, "stop_sequence", "efg", "abcd"),
    ],
)
async def test_the_stop_reason_says_what_ended_the_answer(
    stack: Stack, fields: dict[str, Any], reason: str, matched: str | None, text: str
) -> None:
    stack.workers[0].script = endless
    await stack.start()
    answer = await _ask(stack, **fields)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, matched)
    assert answer.content[0].text == text
    delta = (await _events(stack, **fields))[-2]
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (reason, matched)
    assert delta.usage.output_tokens == answer.usage.output_tokens


async def test_tool_choice_reaches_the_grammar(talker: Stack) -> None:
    says(talker, CALL)
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ):
        answer = await _ask(talker, tools=[WEATHER], tool_choice=choice)
        assert (answer.content[-1].name, answer.stop_reason) == ("weather", "tool_use")
        assert talker.workers[0].requests[-1].grammar.ebnf
    await _ask(talker, tools=[WEATHER], tool_choice={"type": "none"})
    assert "<tools>" not in prompt_of(talker)


async def test_a_schema_constrains_the_text(stack: Stack) -> None:
    await stack.start()
    await _ask(stack, output_config={"format": {"type": "json_schema", "schema": PARAMETERS}})
    assert stack.workers[0].requests[0].grammar.json_schema


async def test_tokens_are_counted_as_a_message_would_have_them(talker: Stack) -> None:
    says(talker, "Yes.")
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [WEATHER]}
    body = _body(fields)
    del body["max_tokens"]
    async with _client(talker) as client:
        counted = await client.messages.count_tokens(**body)
    assert not talker.workers[0].requests
    assert counted.input_tokens == (await _ask(talker, **fields)).usage.input_tokens


async def test_keys_come_in_either_header(stack: Stack) -> None:
    stack.wants_keys = True
    key = "lpx_reader01_" + "a" * 32
    stack.registry.keys = {
        key: registry_pb2.Key(key_id="reader01", tenant="acme", scopes=["reader"])
    }
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    async with _client(stack, key) as client:
        assert (await client.messages.create(**_body({}))).content
    bearer = anthropic.AsyncAnthropic(base_url=stack.url, auth_token=key, max_retries=0)
    async with bearer as client:
        assert (await client.messages.create(**_body({}))).content
    async with _client(stack, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**_body({}))
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


async def test_errors_have_the_shape_of_the_api(stack: Stack) -> None:
    await stack.start()
    error = await _refusal(stack, model="nobody")
    body: Any = error.body
    assert error.status_code == 404 and body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        await _events(stack, model="nobody")


async def test_a_stream_that_fails_later_ends_with_an_error_event(stack: Stack) -> None:
    stack.max_request_s = 4.0
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    await stack.start()
    with pytest.raises(anthropic.APIStatusError) as caught:
        await _events(stack, max_tokens=400)
    body: Any = caught.value.body
    assert body["error"]["type"] == "timeout_error"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}


def _user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (_user(IMAGE), "messages[0].content[0]: blocks of type 'image'"),
        (
            _user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}),
            "messages[0].content[0].content[0]: is of type 'image'",
        ),
        (_user({"type": "document", "source": {}}), "messages[0].content[0]"),
        (_user({"type": "text", "text": "a", "citations": [{}]}), "content[0].citations"),
        (_user({"type": "text"}), "messages[0].content[0].text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "no"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"max_tokens": None}}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"extra_body": {"context_management": {"edits": [{"type": "x"}]}}}, "edits[0]"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers"),
        ({"extra_body": {"container": "c"}}, "container"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
async def test_what_is_wrong_or_not_served_is_named(
    stack: Stack, fields: dict[str, Any], named: str
) -> None:
    await stack.start()
    error = await _refusal(stack, **fields)
    body: Any = error.body
    assert error.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


def _without_id(block: Any) -> dict[str, Any]:
    fields: dict[str, Any] = block.to_dict()
    fields.pop("id", None)
    fields.pop("citations", None)
    return fields
