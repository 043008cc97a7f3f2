"""Requests come out of their messages as they went in, and say what a message cannot hold."""

from __future__ import annotations

import dataclasses

import pytest

from loraplex.api.fields import shared_fields
from loraplex.api.pooling import Pooling
from loraplex.api.request import (
    AdapterSet,
    ChatPrompt,
    GenerateRequest,
    KeptPrefix,
    Prompt,
    RequestedAdapter,
    TextPrompt,
    TokenPrompt,
    UpdatePolicy,
    WorkerRequest,
)
from loraplex.api.request_wire import (
    generate_request_from_proto,
    generate_request_to_proto,
    prompt_from_proto,
    worker_request_from_proto,
    worker_request_to_proto,
)
from loraplex.api.sampling import Grammar, GrammarTokens, Sampling, SamplingParams
from loraplex.errors import InvalidRequest
from loraplex.v1 import inference_pb2, worker_pb2

ASKED = GenerateRequest(
    model="base",
    prompt=TextPrompt("x"),
    sampling=Sampling(max_tokens=3, temperature=0.0),
    adapters=(RequestedAdapter("a", 0.5), RequestedAdapter("b")),
    request_id="r",
    cache_salt="s",
    priority=-2,
    split_key="k",
    first_token_s=1.5,
    on_update=UpdatePolicy.FOLLOW_KEEP_PREFIX,
    routed_from=0,
)
JOB = WorkerRequest(
    request_id="r",
    prompt_ids=(1, 2**32 - 1),
    output_ids=(3,),
    sampling=SamplingParams(max_tokens=9, seed=2**64 - 1),
    adapters=AdapterSet.of([("sha256:b", 1.0), ("sha256:a", 0.5)]),
    tenant="t",
    priority=-3,
    fairness_weight=2.0,
    cache_salt="s",
    sample_index=2,
    remaining_s=0.25,
    remaining_first_token_s=0.125,
    trace="00-1-2-01",
    grammar=Grammar(regex="a+"),
    grammar_tokens=GrammarTokens(((5, "<x>"),), (6,)),
    kept=(KeptPrefix(AdapterSet((("sha256:c", 1.0),)), 5),),
    pooling=Pooling.MEAN,
    routed_from=0,
)


def test_the_examples_set_every_field_to_something_else_than_its_default() -> None:
    for example in (ASKED, JOB):
        for field in dataclasses.fields(example):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            assert getattr(example, field.name) != default, field.name


def names_of(message_type: type) -> set[str]:
    return {field.name for field in message_type.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_every_field_of_the_wire_is_one_of_ours() -> None:
    asked = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert names_of(inference_pb2.GenerateRequest) - {"text", "token_ids", "chat"} == asked - {
        "prompt"
    }
    job = {field.name for field in dataclasses.fields(WorkerRequest)}
    assert names_of(worker_pb2.WorkerRequest) - {"grammar_eos_ids"} == job


def test_what_a_client_asks_comes_out_as_it_went_in() -> None:
    assert generate_request_from_proto(generate_request_to_proto(ASKED)) == ASKED


def test_what_a_worker_gets_comes_out_as_it_went_in() -> None:
    assert worker_request_from_proto(worker_request_to_proto(JOB)) == JOB


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(""),
        TokenPrompt(()),
        TokenPrompt((0, 2**32 - 1)),
        ChatPrompt(({"role": "user", "content": "hi"}, {"role": "assistant", "content": ""})),
    ],
)
def test_a_prompt_of_each_form_comes_out_as_it_went_in(prompt: Prompt) -> None:
    asked = dataclasses.replace(ASKED, prompt=prompt)
    assert generate_request_from_proto(generate_request_to_proto(asked)).prompt == prompt


def test_a_message_that_says_little_means_the_defaults() -> None:
    asked = generate_request_from_proto(inference_pb2.GenerateRequest(text="x"))
    assert asked == GenerateRequest(model="", prompt=TextPrompt("x"))
    job = worker_request_from_proto(worker_pb2.WorkerRequest(prompt_ids=[1], tenant="t"))
    sampling = SamplingParams(max_tokens=0, seed=0)
    assert job == WorkerRequest(prompt_ids=(1,), sampling=sampling, tenant="t", cache_salt="t")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.GenerateRequest(model="m"), "prompt"),
        (inference_pb2.GenerateRequest(chat=inference_pb2.Chat()), "messages"),
    ],
)
def test_a_message_without_a_prompt_is_refused_by_name(
    message: inference_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_from_proto(message, "prompt")
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 1 << 31), ("priority", "high"), ("cache_salt", 7), ("first_token_s", "soon")],
)
def test_a_value_that_a_message_cannot_hold_is_named(name: str, value: object) -> None:
    asked = dataclasses.replace(ASKED, **{name: value})
    with pytest.raises(InvalidRequest) as caught:
        generate_request_to_proto(asked)
    assert [violation.field for violation in caught.value.violations] == [name]


def test_token_ids_that_a_message_cannot_hold_are_refused_without_showing_them() -> None:
    asked = dataclasses.replace(ASKED, prompt=TokenPrompt((1, -987654)))
    with pytest.raises(InvalidRequest) as caught:
        generate_request_to_proto(asked)
    assert "987654" not in str(caught.value)


def test_adapters_are_a_set_whatever_their_order() -> None:
    pairs = [("sha256:b", 1.0), ("sha256:a", 0.5)]
    assert AdapterSet.of(pairs) == AdapterSet.of(reversed(pairs))
    with pytest.raises(AssertionError):
        AdapterSet(tuple(pairs))


def test_shared_fields_are_those_that_both_types_have() -> None:
    @dataclasses.dataclass
    class Narrow:
        tenant: str
        other: int

    assert shared_fields(JOB, Narrow) == {"tenant": "t"}
