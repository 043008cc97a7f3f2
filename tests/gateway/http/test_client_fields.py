"""Fields that clients of OpenAI and vLLM send: each has its effect, has none, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

import loraplex
from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import BOS_ID

ASK = [{"role": "user", "content": "hi"}]


async def _chat(stack: Stack, **extra: Any) -> Any:
    return await stack.openai().chat.completions.create(
        model="base",
        messages=extra.pop("messages", ASK),  # type: ignore[arg-type]
        extra_body=extra,
    )


def _prompt(stack: Stack) -> bytes:
    return bytes(i for i in stack.workers[0].requests[-1].prompt_ids if i < 256)


@pytest.mark.parametrize(
    "field",
    [
        {"verbosity": "low"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_key": "k"},
        {"reasoning_effort": "high"},
        {"service_tier": "auto"},
        {"store": True, "metadata": {"a": "b"}},
        {"safety_identifier": "x", "user": "y"},
    ],
    ids=str,
)
async def test_fields_of_openai_that_change_nothing_are_accepted(
    stack: Stack, field: dict[str, Any]
) -> None:
    await stack.start()
    plain = await _chat(stack)
    assert (await _chat(stack, **field)).choices[0].message == plain.choices[0].message


async def test_an_answer_continues_the_final_message(stack: Stack) -> None:
    await stack.start()
    messages = [*ASK, {"role": "assistant", "content": "Well, "}]
    await _chat(stack, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert _prompt(stack) == b"[user]hi[assistant]Well, "
    await _chat(stack, messages=messages, add_generation_prompt=False)
    assert _prompt(stack) == b"[user]hi[assistant]Well, "
    with pytest.raises(openai.BadRequestError) as caught:
        await _chat(stack, messages=messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


async def test_a_truncated_prompt_keeps_its_end_and_its_special_tokens(stack: Stack) -> None:
    await stack.start()
    client = stack.openai()
    answer = await client.completions.create(
        model="base", prompt="abcdef", extra_body={"truncate_prompt_tokens": 3}
    )
    assert list(stack.workers[0].requests[-1].prompt_ids) == [BOS_ID, *b"ef"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    await client.completions.create(
        model="base", prompt=[1, 2, 3], extra_body={"truncate_prompt_tokens": 2}
    )
    assert list(stack.workers[0].requests[-1].prompt_ids) == [2, 3]
    await client.completions.create(
        model="base", prompt="a" * 600, max_tokens=12, extra_body={"truncate_prompt_tokens": -1}
    )
    assert len(stack.workers[0].requests[-1].prompt_ids) == 500
    await _chat(stack, truncate_prompt_tokens=4)
    assert _prompt(stack) == b"ant]"


async def test_bad_words_reach_the_worker_as_tokens(stack: Stack) -> None:
    await stack.start()
    await _chat(stack, bad_words=["é", "?"], bad_token_ids=[7])
    sampling = stack.workers[0].requests[-1].sampling
    assert list(sampling.bad_token_ids) == [7, ord("?")]
    sequences = {bytes(sequence.ids).decode() for sequence in sampling.bad_sequences}
    assert sequences == {"é", " é", " ?"}


async def test_bad_words_that_cannot_be_are_refused(stack: Stack) -> None:
    await stack.start()
    for words in ([""], [" "], ["a" * 129], ["a"] * 513, [7]):
        with pytest.raises(openai.BadRequestError) as caught:
            await _chat(stack, bad_words=words)
        assert caught.value.param == "bad_words"


@pytest.mark.parametrize("num_tokens", [0, -2, 513])
async def test_a_truncation_that_cannot_be_is_refused(stack: Stack, num_tokens: int) -> None:
    await stack.start()
    with pytest.raises(openai.BadRequestError) as caught:
        await _chat(stack, truncate_prompt_tokens=num_tokens)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("bias", "shown"), [({"1000000": 1}, "1000000"), ({"one": 1}, "'one'"), ({"-1": 1}, "-1")]
)
async def test_a_bad_token_of_logit_bias_is_shown(
    stack: Stack, bias: dict[str, int], shown: str
) -> None:
    await stack.start()
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.openai().chat.completions.create(
            model="base",
            messages=ASK,  # type: ignore[arg-type]
            logit_bias=bias,
        )
    assert caught.value.param == "logit_bias" and shown in caught.value.message


REFUSED: dict[str, object] = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "echo": True,
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "suffix": "x",
    "best_of": 2,
    "spaces_between_special_tokens": False,
    "detokenize": False,
    "vllm_xargs": {"a": 1},
    "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ?",
    "kv_transfer_params": {"a": 1},
    "padding": True,
    "embed_dtype": "float16",
    "endianness": "big",
}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hi"},
    "chat": {"messages": ASK},
    "embeddings": {"input": "hi"},
}
PATHS = {
    "completions": "/completions",
    "chat": "/chat/completions",
    "embeddings": "/embeddings",
}


def _not_yet() -> dict[str, list[str]]:
    """Where each field is refused, as the reference says."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| ([a-z, ]+) \|", page.partition("## Not yet")[2], re.M)
    return {
        field: where.split(", ") for names, where in rows for field in re.findall("`(.*?)`", names)
    }


async def test_what_the_reference_lists_as_not_yet_is_refused_by_name(stack: Stack) -> None:
    await stack.start()
    listed = _not_yet()
    listed.pop("n")
    assert listed.keys() == REFUSED.keys()
    for field, where in listed.items():
        for kind in where:
            body = {"model": "base", **BODIES[kind], field: REFUSED[field]}
            with pytest.raises(openai.BadRequestError) as caught:
                await stack.openai().post(PATHS[kind], body=body, cast_to=object)
            assert caught.value.param == field, (field, kind)


@pytest.mark.parametrize("field", ["lora_path", "adapter_id"])
async def test_a_field_that_would_choose_an_adapter_elsewhere_names_model(
    stack: Stack, field: str
) -> None:
    await stack.start()
    with pytest.raises(openai.BadRequestError, match="into model") as caught:
        await _chat(stack, **{field: "upper"})
    assert caught.value.param == field


async def test_the_version_is_that_of_the_package(stack: Stack) -> None:
    await stack.start()
    answer: Any = await stack.openai().get(f"{stack.url}/version", cast_to=object)
    assert answer == {"version": loraplex.__version__}
