"""Vectors, scores and grammars: what the SDK sends, and what it makes of answers."""

from __future__ import annotations

import json

import pytest

from loraplex.api.sampling import Grammar, Sampling
from loraplex.client.generation import Message
from loraplex.client.generation_wire import generate_request
from loraplex.client.inference_client import InferenceClient
from loraplex.client.settings import Credentials
from loraplex.client.vectors import Score, embed_request, score_request
from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, inference_pb2_grpc
from loraplex.v1 import inference_pb2 as pb
from tests.sdk.servers import serving


class Answering(inference_pb2_grpc.InferenceServiceServicer):
    """Remembers requests; answers with as many outputs as there were inputs."""

    def __init__(self) -> None:
        self.requests: list[pb.EmbedRequest | pb.ScoreRequest] = []

    async def Embed(self, request: pb.EmbedRequest, context: object) -> pb.EmbedResponse:
        self.requests.append(request)
        found = [pb.Embedding(values=[index, 0.5]) for index in range(len(request.prompts))]
        return pb.EmbedResponse(embeddings=found, usage=common_pb2.Usage(prompt_tokens=7))

    async def Score(self, request: pb.ScoreRequest, context: object) -> pb.ScoreResponse:
        self.requests.append(request)
        score = pb.Score(logits=[-1, 2], probabilities=[0.25, 0.75], label="yes")
        served = pb.ServedBy(adapters=["default/judge:v1"])
        return pb.ScoreResponse(
            scores=[score] * len(request.prompts), labels=["no", "yes"], served_by=served
        )


async def test_vectors_and_scores_come_in_the_order_of_inputs() -> None:
    gateway = Answering()
    async with serving(gateway) as address, InferenceClient(address, Credentials()) as client:
        found = await client.embed("a", ["x", [1, 2]], pooling="mean", normalize=False)
        scores = await client.score("judge", "one text")
    assert found.vectors == ((0.0, 0.5), (1.0, 0.5)) and found.usage.prompt_tokens == 7
    assert list(scores) == [Score((-1.0, 2.0), (0.25, 0.75), "yes")]
    assert (scores.labels, scores.served_by.adapters) == (("no", "yes"), ("default/judge:v1",))
    asked, judged = gateway.requests
    assert isinstance(asked, pb.EmbedRequest) and asked.HasField("normalize")
    assert asked.pooling == common_pb2.POOLING_MEAN and not asked.normalize
    assert [prompt.text for prompt in judged.prompts] == ["one text"]


def test_inputs_take_the_form_of_their_type_and_unset_stays_unset() -> None:
    request = embed_request("m", ["x", [1], [Message("user", "hi")]], "", None, 0)
    forms = [prompt.WhichOneof("prompt") for prompt in request.prompts]
    assert forms == ["text", "token_ids", "chat"]
    assert not request.HasField("normalize") and not request.dimensions
    assert request.pooling == common_pb2.POOLING_UNSPECIFIED


@pytest.mark.parametrize(("pooling", "dimensions"), [("max", 0), ("mean", -1), ("", 1 << 32)])
def test_what_the_wire_cannot_carry_is_named(pooling: str, dimensions: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        embed_request("m", "x", pooling, None, dimensions)
    assert caught.value.violations[0].field in ("pooling", "dimensions")
    with pytest.raises(InvalidRequest, match="prompt"):
        score_request("m", [[-1]])


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        (Grammar(json_schema={"type": "object"}), "json_schema"),
        (Grammar(json_schema='{"type": "object"}'), "json_schema"),
        (Grammar(regex="[a-z]+"), "regex"),
        (Grammar(ebnf='start: "a"'), "ebnf"),
        (Grammar(choice=["yes", "no"]), "choice"),
    ],
)
def test_a_grammar_of_each_form_crosses_whole(grammar: Grammar, form: str) -> None:
    sent = generate_request("m", "x", Sampling(grammar=grammar)).sampling.grammar
    assert sent.WhichOneof("form") == form
    if form == "json_schema":
        assert json.loads(sent.json_schema) == {"type": "object"}
    elif form == "choice":
        assert list(sent.choice.options) == ["yes", "no"]
    else:
        assert getattr(sent, form) == getattr(grammar, form)


@pytest.mark.parametrize("grammar", [Grammar(), Grammar(regex="a", choice=["a"])])
def test_a_grammar_has_exactly_one_form(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("m", "x", Sampling(grammar=grammar))
    assert caught.value.violations[0].field == "grammar"
