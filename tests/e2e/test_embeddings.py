"""Vectors through HTTP and gRPC against transformers and PEFT, on the demo base in float32."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from loraplex.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.stack import ADAPTERS, BASE, BASE_ID, Stack

ADAPTER = ADAPTERS[0]
TEXTS = ["hello", "the same length?", "h" * 300]


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.http + "/v1", api_key="ignored", max_retries=0)


def reference(texts: list[str], adapter: Path | None = None) -> list[list[float]]:
    """The last token's state after the last norm, of length 1."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            state = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        vectors.append((state / state.norm()).tolist())
    return vectors


def assert_close(got: list[list[float]], want: list[list[float]]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours) == len(theirs)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["base", "adapter"])
def test_vectors_are_those_of_transformers_and_peft(
    client: openai.OpenAI, adapter: Path | None
) -> None:
    model = BASE_ID if adapter is None else adapter.name
    answer = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert_close([entry.embedding for entry in answer.data], reference(TEXTS, adapter))
    assert answer.usage.prompt_tokens == sum(len(text) + 1 for text in TEXTS)


def test_a_conversation_has_the_vector_of_its_rendered_template(
    client: openai.OpenAI, stack: Stack
) -> None:
    body = {"model": BASE_ID, "messages": [{"role": "user", "content": "hello"}]}
    tokens = client.post(
        f"{stack.http}/tokenize", body=body | {"add_generation_prompt": False}, cast_to=object
    )
    answer: Any = client.post("/embeddings", body=body, cast_to=object)
    by_ids = client.embeddings.create(
        model=BASE_ID,
        input=tokens["tokens"],  # type: ignore[index]
        encoding_format="float",
    )
    assert answer["data"][0]["embedding"] == by_ids.data[0].embedding
    assert answer["usage"]["prompt_tokens"] == tokens["count"]  # type: ignore[index]


def test_a_truncated_input_keeps_its_beginning(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": BASE_ID, "encoding_format": "float"}
    short = client.embeddings.create(input="hello", **fields)
    cut = client.embeddings.create(
        input="hello, world",
        extra_body={"truncate_prompt_tokens": short.usage.prompt_tokens},
        **fields,
    )
    assert cut.data[0].embedding == short.data[0].embedding


def test_all_forms_of_input_and_encoding_give_the_same_vector(
    client: openai.OpenAI, stack: Stack
) -> None:
    ids = [256, *b"hello"]
    vectors = [
        client.embeddings.create(model=BASE_ID, input=form, encoding_format="float")
        for form in ("hello", ["hello"], ids, [ids])
    ]
    first = vectors[0].data[0].embedding
    assert math.isclose(sum(value * value for value in first), 1.0, rel_tol=1e-6)
    for answer in vectors[1:]:
        assert_close([answer.data[0].embedding], [first])
    body = {"model": BASE_ID, "input": "hello", "encoding_format": "base64"}
    status, answer_body = stack.post("/v1/embeddings", body)
    assert status == 200
    packed = base64.b64decode(answer_body["data"][0]["embedding"])
    assert_close([list(struct.unpack(f"<{len(first)}f", packed))], [first])


def test_the_vectors_of_a_large_answer_are_those_of_small_ones(client: openai.OpenAI) -> None:
    """Large ones are formatted in another thread."""
    fields: dict[str, Any] = {"model": BASE_ID, "encoding_format": "float"}
    answer = client.embeddings.create(input=TEXTS[:2] * 60, **fields)
    small = client.embeddings.create(input=TEXTS[:2], **fields)
    assert [entry.index for entry in answer.data] == list(range(120))
    assert len(answer.data[0].embedding) * 120 > 16_384
    expected = [entry.embedding for entry in small.data] * 60
    assert_close([entry.embedding for entry in answer.data], expected)


def test_grpc_embeds_with_the_same_vectors(client: openai.OpenAI, stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = stub.Embed(inference_pb2.EmbedRequest(model=ADAPTER.name, inputs=TEXTS))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Embed(inference_pb2.EmbedRequest(model=BASE_ID))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    got = [list(embedding.values) for embedding in answer.embeddings]
    want = client.embeddings.create(model=ADAPTER.name, input=TEXTS, encoding_format="float")
    assert_close(got, [entry.embedding for entry in want.data])
    assert answer.usage.prompt_tokens == want.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "colour": "red"}, "colour"),
        ({"input": "a", "model": ""}, "model"),
    ],
)
def test_a_bad_field_is_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    status, answer = stack.post("/v1/embeddings", {"model": BASE_ID, **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param
