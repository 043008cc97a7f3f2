"""The Responses API through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from loraplex.v1 import registry_pb2
from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.talking import CALL, PARAMETERS, prompt_of, says, started_talker
from tests.gateway.scripted_worker import endless

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS}


@pytest.fixture
async def talker(stack: Stack) -> Stack:
    return await started_talker(stack)


async def _ask(stack: Stack, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "base", "input": "hi"} | fields
    return await stack.openai().responses.create(**body)


async def _refusal(stack: Stack, **fields: Any) -> openai.APIStatusError:
    num_requests = len(stack.workers[0].requests)
    with pytest.raises(openai.APIStatusError) as caught:
        await _ask(stack, **fields)
    assert len(stack.workers[0].requests) == num_requests
    return caught.value


async def test_a_response_has_the_fields_and_types_of_the_official_client(talker: Stack) -> None:
    says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}")
    answer = await _ask(
        talker,
        tools=[WEATHER],
        instructions="Be brief.",
        metadata={"a": "b"},
        max_output_tokens=200,
        temperature=0.5,
        include=["reasoning.encrypted_content"],
    )
    checked = Response.model_validate(answer.to_dict())
    assert checked.status == "completed" and checked.completed_at is not None
    assert (checked.instructions, checked.metadata) == ("Be brief.", {"a": "b"})
    assert (checked.max_output_tokens, checked.temperature) == (200, 0.5)
    thought, message, call = checked.output
    assert thought.type == "reasoning" and thought.content is not None
    assert [part.text for part in thought.content] == ["let me look"]
    assert message.type == "message" and checked.output_text == "One moment."
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Zürich"}
    usage = checked.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("let me look\n")
    assert prompt_of(talker).split("[assistant]")[0].endswith("[system]Be brief.[user]hi")


async def test_streamed_events_are_those_of_the_official_client_and_add_up(talker: Stack) -> None:
    says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}\n{CALL}")
    complete = await _ask(talker, tools=[WEATHER])
    events = [event async for event in await _ask(talker, tools=[WEATHER], stream=True)]
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    seen = [kind for at, kind in enumerate(kinds) if kind != (kinds[at - 1] if at else "")]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "{}.delta", "{}.done"]
    expected = [
        *(step.format("reasoning_text") for step in text),
        "output_item.done",
        *(step.format("output_text") for step in text),
        "output_item.done",
        *(step.format("function_call_arguments") for step in call),
        "output_item.done",
        *(step.format("function_call_arguments") for step in call),
        "output_item.done",
    ]
    assert [kind.removeprefix("response.") for kind in seen[2:-1]] == expected
    final = events[-1].response
    assert _without_ids(final) == _without_ids(complete)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == final.output_text == "One moment."


async def test_the_clients_own_collector_ends_with_the_same_response(talker: Stack) -> None:
    says(talker, f"hm</think>Well.\n{CALL}")
    tools: Any = [WEATHER]
    asked: dict[str, Any] = {"model": "base", "input": "hi", "tools": tools}
    async with talker.openai().responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Well."


async def test_an_empty_answer_is_one_empty_message(talker: Stack) -> None:
    says(talker, "</think>")
    complete = await _ask(talker)
    events = [event async for event in await _ask(talker, stream=True)]
    assert [item.type for item in complete.output] == ["message"] and complete.output_text == ""
    assert events[-1].response.output_text == ""
    Response.model_validate(complete.to_dict())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_incomplete_and_says_why(stack: Stack, stream: bool) -> None:
    stack.workers[0].script = endless
    await stack.start()
    answer = await _ask(stack, max_output_tokens=5, stream=stream)
    if stream:
        events = [event async for event in answer]
        assert events[-1].type == "response.incomplete"
        answer = events[-1].response
    assert answer.status == answer.output[-1].status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "abcde"


async def test_a_response_is_continued_by_its_id(talker: Stack) -> None:
    says(talker, f"hm</think>Wait.\n{CALL}")
    first = await _ask(talker, tools=[WEATHER], instructions="Be brief.")
    call_id = first.output[-1].call_id
    result = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
    says(talker, "</think>It rains.")
    second = await _ask(talker, input=[result], previous_response_id=first.id, tools=[WEATHER])
    asked = "[user]hi[assistant]<think>hm</think>Wait.<weather Zürich>[tool]rain[assistant]"
    assert asked in prompt_of(talker) and "Be brief" not in prompt_of(talker)
    assert second.previous_response_id == first.id
    await _ask(talker, input="thanks", previous_response_id=second.id)
    assert "[tool]rain[assistant]It rains.[user]thanks[assistant]" in prompt_of(talker)


async def test_items_of_a_response_can_be_sent_back_and_referred_to(talker: Stack) -> None:
    says(talker, f"hm</think>Wait.\n{CALL}")
    first = await _ask(talker, tools=[WEATHER])
    asked = "[user]hi[assistant]<think>hm</think>Wait.<weather Zürich>[tool]rain[assistant]"
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    ask = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    sent = [item.to_dict() for item in first.output]
    await _ask(talker, input=[ask, *sent, result], tools=[WEATHER])
    assert asked in prompt_of(talker)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    await _ask(talker, input=[ask, *references, result], tools=[WEATHER])
    assert asked in prompt_of(talker)
    error = await _refusal(talker, input=[ask, {"type": "item_reference", "id": "msg_0"}])
    assert (error.status_code, error.param) == (404, "input[1].id")
    error = await _refusal(talker, input=[ask, *references, references[0]])
    assert (error.status_code, error.param) == (400, f"input[{1 + len(references)}].id")


async def test_encoded_thoughts_come_back_without_a_store(talker: Stack) -> None:
    says(talker, "hm, é</think>Yes.")
    asked = {"store": False, "include": ["reasoning.encrypted_content"]}
    thought = (await _ask(talker, **asked)).output[0].to_dict()
    opaque = {name: thought[name] for name in ("id", "type", "summary", "encrypted_content")}
    await _ask(talker, input=[opaque, {"role": "assistant", "content": "Yes."}], **asked)
    assert "[assistant]<think>hm, é</think>Yes." in prompt_of(talker)
    error = await _refusal(talker, input=[opaque | {"encrypted_content": "gAAAA"}])
    assert error.param == "input[0].encrypted_content"


async def test_stored_responses_are_read_listed_and_deleted(talker: Stack) -> None:
    says(talker, "</think>Yes.")
    client = talker.openai()
    kept = await _ask(talker, input=[{"role": "user", "content": text} for text in "ab"])
    assert await client.responses.retrieve(kept.id) == kept
    items: Any = await client.responses.input_items.list(kept.id, order="asc", limit=1)
    assert [_text_of(item) for item in items.data] == ["a"] and items.has_more
    rest: Any = await client.responses.input_items.list(kept.id, order="asc", after=items.last_id)
    assert [_text_of(item) for item in rest.data] == ["b"]
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(kept.id)
    await client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(kept.id)
    assert caught.value.code == "response_not_found"


async def test_what_is_not_kept_is_a_clear_404(talker: Stack) -> None:
    says(talker, "</think>Yes.")
    answer = await _ask(talker, store=False)
    error = await _refusal(talker, previous_response_id=answer.id)
    assert (error.status_code, error.code) == (404, "previous_response_not_found")
    assert error.param == "previous_response_id"
    assert "store: false" in error.message and "restart" in error.message


async def test_a_schema_constrains_the_text(stack: Stack) -> None:
    await stack.start()
    text = {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS}}
    answer = await _ask(stack, text={**text, "verbosity": "low"})
    assert json.loads(stack.workers[0].requests[0].grammar.json_schema) == PARAMETERS
    Response.model_validate(answer.to_dict())
    await _ask(stack, text={"format": {"type": "json_object"}})
    assert stack.workers[0].requests[1].grammar.json_schema == '{"type":"object"}'


async def test_tool_choice_and_parallel_calls_reach_the_grammar(talker: Stack) -> None:
    says(talker, f"hm</think>{CALL}")
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = await _ask(
            talker, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=choice == "required"
        )
        assert answer.output[-1].name == "weather"
        assert answer.tool_choice is not None
        assert talker.workers[0].requests[-1].grammar.ebnf
    await _ask(talker, tools=[WEATHER], tool_choice="none")
    assert not talker.workers[0].requests[-1].HasField("grammar")
    assert "<tools>" not in prompt_of(talker)


async def test_functions_of_a_namespace_are_called_by_namespace_and_name(talker: Stack) -> None:
    says(talker, f"</think>{CALL}".replace("weather", "sky__weather"))
    tools = [{"type": "namespace", "name": "sky", "description": "of the sky", "tools": [WEATHER]}]
    answer = await _ask(talker, tools=tools)
    call = answer.output[-1]
    assert (call.namespace, call.name) == ("sky", "weather")
    Response.model_validate(answer.to_dict())
    assert '"name": "sky__weather"' in prompt_of(talker)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    await _ask(talker, tools=tools, input=[call.to_dict(), result])
    assert "<sky__weather Zürich>[tool]rain" in prompt_of(talker)
    error = await _refusal(talker, tools=[{**tools[0], "tools": [{"type": "web_search"}]}])
    assert error.param == "tools[0].tools[0].type"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_text_after_the_thought(
    talker: Stack, stream: bool
) -> None:
    says(talker, "hm</think>Yes")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await _ask(talker, stream=stream, **asked)
    streamed = []
    if stream:
        async for event in answer:
            EVENT.validate_python(event.to_dict())
            if event.type == "response.output_text.delta":
                streamed += [entry.token for entry in event.logprobs]
        answer = event.response
    logprobs = answer.output[-1].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["Y", "e", "s", "</s>"]
    assert len(logprobs[0].top_logprobs) == 2
    if stream:  # the last token has no text: its entry is in a delta if that came late
        assert streamed in (["Y", "e", "s"], ["Y", "e", "s", "</s>"])


async def test_tokens_of_the_input_are_counted_without_a_worker(talker: Stack) -> None:
    says(talker, "</think>Yes.")
    counted = await talker.openai().responses.input_tokens.count(model="base", input="hi")
    assert counted.input_tokens > 0 and not talker.workers[0].requests
    answer = await _ask(talker)
    assert answer.usage.input_tokens == counted.input_tokens


async def test_an_error_before_the_first_token_has_its_own_status(stack: Stack) -> None:
    await stack.start()
    error = await _refusal(stack, model="nobody", stream=True)
    assert (error.status_code, error.code) == (404, "model_not_found")


async def test_a_stream_that_fails_later_ends_with_a_failed_response(stack: Stack) -> None:
    stack.max_request_s = 4.0
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    await stack.start()
    events = [event async for event in await _ask(stack, stream=True)]
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert failed.status == "failed" and failed.error.code == "server_error"
    assert failed.output_text.startswith("abc")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c1"}, "conversation"),
        ({"prompt": {"id": "p1"}}, "prompt"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "critic", "content": "no"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a", "mood": "b"}]}, "input[0].mood"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0]"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "now"}},
            "tool_choice",
        ),
        ({"tools": [WEATHER], "top_logprobs": 2}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}},
            "text.format.schema",
        ),
        ({"text": {"tone": "warm"}}, "text.tone"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"metadata": {"a": 3}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "a" * 600}, "input"),
        ({"top_p": 9.0}, "top_p"),
    ],
)
async def test_what_is_wrong_or_not_served_is_named(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    await stack.start()
    error = await _refusal(stack, **fields)
    assert (error.status_code, error.param) == (400, param)
    assert param in error.message


async def test_responses_are_private_to_their_tenant(stack: Stack) -> None:
    stack.wants_keys = True
    keys = {f"lpx_{tenant}01_{tenant[0] * 64}": tenant for tenant in ("acme", "rival")}
    stack.registry.keys = {
        token: registry_pb2.Key(key_id=f"{tenant}01", tenant=tenant, scopes=["reader"])
        for token, tenant in keys.items()
    }
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")
    acme, rival = (stack.openai().with_options(api_key=token) for token in keys)
    kept = await acme.responses.create(model="base", input="hi")
    assert (await acme.responses.retrieve(kept.id)).id == kept.id
    for attempt in (
        rival.responses.retrieve(kept.id),
        rival.responses.delete(kept.id),
        rival.responses.create(model="base", input="hi", previous_response_id=kept.id),
        rival.responses.create(
            model="base",
            input=[{"type": "item_reference", "id": kept.output[0].id or ""}],
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert (await acme.responses.retrieve(kept.id)).id == kept.id


def _without_ids(response: Any) -> dict[str, Any]:
    fields: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        fields.pop(name)
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return fields


def _text_of(item: Any) -> str:
    fields = item.to_dict()
    [part] = fields["content"]
    assert (fields["type"], part["type"]) == ("message", "input_text")
    return str(part["text"])
