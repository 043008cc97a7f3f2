"""The official client, unchanged, against the HTTP API."""

from __future__ import annotations

import ssl
from typing import Any

import openai
import pytest

from loraplex_services.common.security.tls import http_tls_files
from tests.certificates import Authority
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import endless
from tests.gateway.tiny_tokenizer import EOS_ID


async def test_completion_has_text_usage_and_the_model_as_asked(stack: Stack) -> None:
    stack.registry.put("upper")
    await stack.start()
    answer = await stack.openai().completions.create(
        model="upper:v1", prompt="abc", max_tokens=64, temperature=0
    )
    assert answer.model == "upper:v1"
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.endswith(" é€😀")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(answer.choices[0].text.encode()) + 1
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens


async def test_stream_adds_up_to_the_text_of_the_whole_answer(stack: Stack) -> None:
    await stack.start()
    client = stack.openai()
    complete = await client.completions.create(model="base", prompt="abc", max_tokens=64)
    text, usages, reasons = "", [], []
    stream = await client.completions.create(
        model="base",
        prompt="abc",
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.text
            reasons.append(choice.finish_reason)
    assert text == complete.choices[0].text
    assert usages[-1] == complete.usage
    assert set(usages[:-1]) == {None}
    assert [reason for reason in reasons if reason] == ["stop"]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_continuous_usage_is_in_every_chunk_and_grows_with_it(
    stack: Stack, is_chat: bool
) -> None:
    await stack.start()
    client = stack.openai()
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"model": "base", "stream": True, "stream_options": options}
    if is_chat:
        messages = [{"role": "user", "content": "hi"}]
        stream: Any = await client.chat.completions.create(messages=messages, **fields)
    else:
        stream = await client.completions.create(prompt="hi", max_tokens=64, **fields)
    *chunks, last = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == (0 if is_chat else 1)
    assert counts == sorted(set(counts)) and counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        for chunk in chunks
    )


async def test_continuous_usage_is_that_of_the_choice_of_a_chunk(stack: Stack) -> None:
    await stack.start()
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await stack.openai().completions.create(
        model="base", prompt=["a", "abc"], n=2, max_tokens=4, stream=True, stream_options=options
    )
    *chunks, last = [chunk async for chunk in stream]
    newest = {chunk.choices[0].index: chunk.usage for chunk in chunks}
    assert [newest[index].prompt_tokens for index in range(4)] == [2, 2, 4, 4]
    assert {usage.completion_tokens for usage in newest.values()} == {4}
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 16)


async def test_continuous_usage_without_usage_is_refused(stack: Stack) -> None:
    await stack.start()
    options: Any = {"include_usage": False, "continuous_usage_stats": True}
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.openai().completions.create(
            model="base", prompt="hi", stream=True, stream_options=options
        )
    assert caught.value.param == "stream_options.continuous_usage_stats"


async def test_max_tokens_defaults_to_16_and_ends_with_length(stack: Stack) -> None:
    stack.workers[0].script = endless
    await stack.start()
    answer = await stack.openai().completions.create(model="base", prompt="abc")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16


async def test_chat_renders_the_template_without_special_tokens(stack: Stack) -> None:
    await stack.start()
    answer = await stack.openai().chat.completions.create(
        model="base",
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
        ],
    )
    sent = stack.workers[0].requests[0]
    assert bytes(sent.prompt_ids).decode() == "[user]hi[user]there[assistant]"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.endswith("😀")
    assert sent.sampling.max_tokens == 512 - len(sent.prompt_ids)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
async def test_image_and_audio_parts_are_refused_by_name(stack: Stack, part: Any) -> None:
    await stack.start()
    content = [{"type": "text", "text": "what is this?"}, part]
    with pytest.raises(openai.BadRequestError) as error:
        await stack.openai().chat.completions.create(
            model="base", messages=[{"role": "user", "content": content}]
        )
    assert error.value.status_code == 400
    assert error.value.param == "messages[0].content[1]"
    assert part["type"] in error.value.message
    assert stack.workers[0].requests == []


async def test_chat_stream_opens_with_the_role(stack: Stack) -> None:
    await stack.start()
    stream = await stack.openai().chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas).endswith("é€😀")


async def test_choices_come_prompt_major(stack: Stack) -> None:
    await stack.start()
    client = stack.openai()
    answer = await client.completions.create(
        model="base", prompt=["one", "two"], n=2, max_tokens=64
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [
        (await client.completions.create(model="base", prompt=p, n=2, max_tokens=64)).choices
        for p in ("one", "two")
    ]
    expected = [choice.text for choices in alone for choice in choices]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 4


async def test_token_prompts_are_taken_as_they_are(stack: Stack) -> None:
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base",
        prompt=[[104, 105], [263]],
        max_tokens=2,
        extra_body={"return_token_ids": True},
    )
    assert [list(sent.prompt_ids) for sent in stack.workers[0].requests] == [[104, 105], [263]]
    assert answer.choices[1].model_extra is not None
    assert answer.choices[1].model_extra["prompt_token_ids"] == [263]
    assert len(answer.choices[1].model_extra["token_ids"]) == 2


async def test_generated_ids_include_eos_and_text_does_not(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [104, 105, EOS_ID]
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base", prompt="x", extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == "hi"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == [104, 105, EOS_ID]
    assert answer.usage is not None and answer.usage.completion_tokens == 3


async def test_stop_string_cuts_the_text_and_cancels_the_worker(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.01
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base", prompt="x", max_tokens=400, stop=["efg"]
    )
    assert answer.choices[0].text == "abcd"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)


async def test_echo_puts_the_prompt_first(stack: Stack) -> None:
    await stack.start()
    client = stack.openai()
    answer = await client.completions.create(model="base", prompt="héllo", echo=True, max_tokens=3)
    assert answer.choices[0].text.startswith("héllo ba")
    nothing = await client.completions.create(model="base", prompt="héllo", echo=True, max_tokens=0)
    assert nothing.choices[0].text == "héllo"
    assert nothing.choices[0].finish_reason == "length"
    assert nothing.usage is not None and nothing.usage.completion_tokens == 0


async def test_completion_logprobs_line_up_with_the_text(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [*"aé".encode(), EOS_ID]
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base", prompt="x", logprobs=2, max_tokens=8
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


async def test_echo_with_logprobs_covers_the_prompt(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [*b"yz", EOS_ID]
    await stack.start()
    answer = await stack.openai().completions.create(
        model="base", prompt="ab", logprobs=1, echo=True, max_tokens=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["<s>", "a", "b"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.text_offset == [0, 0, 1]
    generated = await stack.openai().completions.create(
        model="base", prompt="ab", logprobs=1, echo=True, max_tokens=2
    )
    assert generated.choices[0].text == "abyz"
    assert generated.choices[0].logprobs is not None
    assert generated.choices[0].logprobs.text_offset == [0, 0, 1, 2, 3]


async def test_chat_logprobs_have_bytes_and_alternatives(stack: Stack) -> None:
    stack.workers[0].script = lambda _: [0xC3, 0xA9, EOS_ID]
    await stack.start()
    answer = await stack.openai().chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=1,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert content[0].token == "bytes:\\xc3"
    assert content[0].bytes == [0xC3]
    assert [top.token for top in content[0].top_logprobs] == ["bytes:\\xc3"]


async def test_models_lists_the_base_first_then_adapters(stack: Stack) -> None:
    stack.registry.put("upper")
    stack.registry.put("foreign", base_id="elsewhere")
    await stack.start()
    page = await stack.openai().models.list()
    assert [model.id for model in page.data] == ["base", "upper"]
    assert page.data[1].model_extra is not None
    assert page.data[1].model_extra["parent"] == "base"
    assert page.data[1].model_extra["root"].startswith("sha256:")
    assert (await stack.openai().models.retrieve("default/upper")).id == "default/upper"


async def test_unknown_model_is_not_found(stack: Stack) -> None:
    await stack.start()
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.openai().completions.create(model="nobody", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
        ({"extra_body": {"lora_scale": "big"}}, "lora_scale"),
        ({"extra_body": {"lora_scale": 1e9}}, "lora_scale"),
        ({"extra_body": {"guided_json": 7}}, "guided_json"),
        ({"extra_body": {"guided_regex": ["a"]}}, "guided_regex"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": ""}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"xml": "a"}}}, "structured_outputs.xml"),
        ({"extra_body": {"guided_choice": ["a" * (1 << 18)]}}, "guided_choice"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"model": "Up per"}, "model"),
    ],
    ids=str,
)
async def test_bad_field_is_named(stack: Stack, fields: dict[str, object], param: str) -> None:
    await stack.start()
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.openai().completions.create(**({"model": "base", "prompt": "x"} | fields))
    assert caught.value.param == param
    assert param in caught.value.message


async def test_fields_without_meaning_here_are_ignored(stack: Stack) -> None:
    await stack.start()
    answer = await stack.openai().chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hi"}],
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        response_format={"type": "text"},
    )
    assert answer.choices[0].finish_reason == "stop"


async def test_the_http_api_speaks_tls_with_its_own_certificate(stack: Stack) -> None:
    house = Authority(stack.folder / "ca")
    pair = house.issue("gateway")
    stack.http_tls = http_tls_files({"LORAPLEX_HTTP_CERT": str(pair.cert)})
    await stack.start()
    assert stack.url.startswith("https://")
    trusting = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=house.ca))
    stack.client = openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=trusting
    )
    complete = await stack.client.completions.create(model="base", prompt="abc", max_tokens=8)
    stream = await stack.client.completions.create(
        model="base", prompt="abc", max_tokens=8, stream=True
    )
    parts = [choice.text async for chunk in stream for choice in chunk.choices]
    assert "".join(parts) == complete.choices[0].text
    stranger = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        await stranger.models.list()
    await stranger.close()
