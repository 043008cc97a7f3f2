"""Requests cross whole; streams are collected, cut streams are noticed."""

from __future__ import annotations

import pytest

from loraplex.api.sampling import Sampling
from loraplex.client.generation import Message, Prompt
from loraplex.client.generation_wire import generate_request
from loraplex.client.inference_client import InferenceClient
from loraplex.client.settings import Credentials
from loraplex.errors import InvalidRequest, ResourceExhausted, Unavailable
from loraplex.v1 import common_pb2
from loraplex.v1 import inference_pb2 as pb
from tests.sdk.servers import ScriptedGateway, serving

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


async def test_collects_interleaved_choices() -> None:
    served = pb.ServedBy(adapters=["default/upper:v1"], digests=["sha256:00"], worker_id="w")
    gateway = ScriptedGateway(
        [
            pb.GenerateResponse(index=0, text="A", token_ids=[1], served_by=served),
            pb.GenerateResponse(index=1, text="x", token_ids=[7], served_by=served),
            pb.GenerateResponse(index=0, text="B", token_ids=[2, 3], finish_reason=STOP),
            pb.GenerateResponse(
                index=1,
                text="y",
                finish_reason=LENGTH,
                usage=common_pb2.Usage(prompt_tokens=4, completion_tokens=4),
            ),
        ]
    )
    async with serving(gateway) as address, InferenceClient(address, Credentials()) as client:
        completion = await client.complete("upper", "ab", Sampling(n=2, seed=5))
    assert completion.text == "AB"
    assert [choice.text for choice in completion.choices] == ["AB", "xy"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
    assert completion.choices[0].token_ids == (1, 2, 3)
    assert completion.choices[0].served_by is not None
    assert completion.choices[0].served_by.adapters == ("default/upper:v1",)
    assert completion.usage.prompt_tokens == 4
    assert gateway.requests[0].sampling.seed == 5


async def test_stream_that_ends_early_is_unavailable() -> None:
    gateway = ScriptedGateway([pb.GenerateResponse(index=0, text="A")])
    async with serving(gateway) as address, InferenceClient(address, Credentials()) as client:
        with pytest.raises(Unavailable, match="ended early"):
            await client.complete("upper", "ab")


async def test_error_in_the_middle_keeps_the_chunks_before_it() -> None:
    error = ResourceExhausted("shed", retry_after_s=2.0)
    gateway = ScriptedGateway([pb.GenerateResponse(text="A")], error)
    texts = []
    async with serving(gateway) as address, InferenceClient(address, Credentials()) as client:
        with pytest.raises(ResourceExhausted) as caught:
            async for chunk in client.generate("upper", "ab"):
                texts.append(chunk.text)
    assert texts == ["A"]
    assert caught.value.retry_after_s == 2.0


async def test_models_follows_pages() -> None:
    async with (
        serving(ScriptedGateway([])) as address,
        InferenceClient(address, Credentials()) as client,
    ):
        assert [model.id async for model in client.models()] == ["m0", "m1", "m2"]


@pytest.mark.parametrize(
    ("prompt", "form"),
    [("text", "text"), ([1, 2], "token_ids"), ([Message("user", "hi")], "chat")],
    ids=["text", "ids", "chat"],
)
def test_prompt_takes_the_form_of_its_type(prompt: Prompt, form: str) -> None:
    assert generate_request("m", prompt, Sampling()).WhichOneof("prompt") == form


def test_mixed_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="mixture"):
        generate_request("m", [1, Message("user", "x")], Sampling())  # type: ignore[list-item]


def test_unset_sampling_stays_unset_and_false_is_sent() -> None:
    plain = generate_request("m", "x", Sampling()).sampling
    for name in ("max_tokens", "temperature", "top_p", "seed", "skip_special_tokens", "scale"):
        assert not plain.HasField(name), name
    sent = generate_request("m", "x", Sampling(temperature=0.0, skip_special_tokens=False)).sampling
    assert sent.HasField("temperature") and sent.HasField("skip_special_tokens")


def test_adapters_carry_their_weights() -> None:
    request = generate_request("base", "x", Sampling(), {"a": 0.5, "b:v2": 1.0})
    assert [(a.ref, a.weight) for a in request.adapters] == [("a", 0.5), ("b:v2", 1.0)]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(max_tokens=-1), "max_tokens"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(seed=1 << 64), "seed"),
        (Sampling(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        (Sampling(stop_token_ids=[-1]), "stop_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_value_the_wire_cannot_carry_is_named(sampling: Sampling, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("m", "x", sampling)
    assert caught.value.violations[0].field == field


def test_negative_token_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        generate_request("m", [1, -1], Sampling())
