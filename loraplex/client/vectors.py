"""Types of embeddings and scores, and the conversion of their requests and responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loraplex.api.output import ServedBy, Usage
from loraplex.api.pooling import Pooling
from loraplex.api.request_wire import prompt_into
from loraplex.api.wire import from_message, pooling_to_proto
from loraplex.client.generation import Prompt
from loraplex.client.generation_wire import to_prompt
from loraplex.errors import InvalidRequest
from loraplex.v1 import inference_pb2 as pb

_POOLINGS = ("", Pooling.LAST, Pooling.MEAN)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors in the order of their inputs."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    served_by: ServedBy


@dataclass(frozen=True, slots=True)
class Score:
    """The outputs of a classification head for one input."""

    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    """Softmax, or sigmoids for a single or several labels at once; empty for a regression."""
    label: str
    """Label of the largest logit; "" for a regression."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores in the order of their inputs. Iterating yields them."""

    scores: tuple[Score, ...]
    labels: tuple[str, ...]
    """Names of the head's outputs."""
    usage: Usage
    served_by: ServedBy

    def __iter__(self) -> Iterator[Score]:
        return iter(self.scores)


def embed_request(
    model: str,
    inputs: str | Sequence[Prompt],
    pooling: str,
    normalize: bool | None,
    dimensions: int,
) -> pb.EmbedRequest:
    """The wire form. Raises: InvalidRequest naming what it cannot carry."""
    if pooling not in _POOLINGS:
        raise InvalidRequest.field("pooling", pooling, 'must be "last", "mean" or ""')
    if not 0 <= dimensions < 1 << 32:
        raise InvalidRequest.field("dimensions", dimensions, "must be 0 or more")
    request = pb.EmbedRequest(
        model=model, pooling=pooling_to_proto(Pooling(pooling)), dimensions=dimensions
    )
    if normalize is not None:
        request.normalize = normalize
    _fill(request, inputs)
    return request


def score_request(model: str, inputs: str | Sequence[Prompt]) -> pb.ScoreRequest:
    """The wire form. Raises: InvalidRequest naming what it cannot carry."""
    request = pb.ScoreRequest(model=model)
    _fill(request, inputs)
    return request


def _fill(request: pb.EmbedRequest | pb.ScoreRequest, inputs: str | Sequence[Prompt]) -> None:
    for prompt in [inputs] if isinstance(inputs, str) else inputs:
        prompt_into(request.prompts.add(), to_prompt(prompt))


def embeddings(message: pb.EmbedResponse) -> Embeddings:
    """Vectors of a response."""
    vectors = tuple(tuple(embedding.values) for embedding in message.embeddings)
    return Embeddings(vectors, *_facts(message))


def scores(message: pb.ScoreResponse) -> Scores:
    """Scores of a response."""
    found = tuple(from_message(score, Score) for score in message.scores)
    labels = tuple(message.labels)
    return Scores(found, labels, *_facts(message))


def _facts(message: pb.EmbedResponse | pb.ScoreResponse) -> tuple[Usage, ServedBy]:
    return from_message(message.usage, Usage), from_message(message.served_by, ServedBy)
