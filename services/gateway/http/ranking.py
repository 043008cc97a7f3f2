"""Parses bodies of /v1/score and /v1/rerank, in vLLM's, Jina's and Cohere's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from loraplex.errors import InvalidRequest
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.calls import model_of
from loraplex_services.gateway.http.embeddings import usage_of
from loraplex_services.gateway.http.formatting import UsageInfo
from loraplex_services.gateway.http.prompts import MAX_PROMPTS
from loraplex_services.gateway.pipeline.embedding import Pooled


@dataclass(frozen=True, slots=True)
class RankingCall:
    """One HTTP request for scores of pairs of texts."""

    model: str
    pairs: tuple[tuple[str, str], ...]
    use_activation: bool
    field_names: dict[str, str]
    num_best: int
    """Number of results of a ranking that are shown."""
    truncate_prompt_tokens: int | None = None
    documents: tuple[Any, ...] = ()
    """Documents of a ranking, as sent; empty if the answer does not repeat them."""


class ScoreItem(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: UsageInfo


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class Ranking(TypedDict):
    id: str
    model: str
    usage: UsageInfo
    results: list[Ranked]


def parse_score(fields: dict[str, Any]) -> RankingCall:
    """Body of /v1/score: a text and its partners, or two lists that are paired in order.

    Raises: InvalidRequest, Unsupported.
    """
    body = Body(fields)
    model = model_of(body)
    first, second = _side(body, ("text_1", "queries")), _side(body, ("text_2", "documents"))
    use_activation = body.flag("use_activation", default=True)
    truncation = body.integer("truncate_prompt_tokens")
    body.finish()
    (left, firsts), (right, seconds) = first, second
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        why = f"{len(firsts)} texts of {left} cannot be paired with {len(seconds)}"
        raise InvalidRequest.field(right, len(seconds), f"{why}; send one or as many")
    pairs = tuple(zip(firsts, seconds, strict=True))
    return RankingCall(model, pairs, use_activation, {"prompt": right}, len(pairs), truncation)


def parse_rerank(fields: dict[str, Any]) -> RankingCall:
    """Body of /v1/rerank. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model = model_of(body)
    query = body.text("query")
    if not query:
        raise InvalidRequest.field("query", "", "is missing or empty")
    documents = body.raw("documents")
    texts = _texts(documents, "documents")
    num_best = body.integer("top_n")
    if num_best is not None and num_best < 1:
        raise InvalidRequest.field("top_n", num_best, "must be at least 1")
    repeats = body.flag("return_documents", default=True)
    use_activation = body.flag("use_activation", default=True)
    truncation = body.integer("truncate_prompt_tokens")
    body.finish()
    return RankingCall(
        model,
        tuple((query, text) for text in texts),
        use_activation,
        {"prompt": "documents"},
        num_best or len(texts),
        truncation,
        tuple(each if isinstance(each, dict) else {"text": each} for each in documents)
        if repeats
        else (),
    )


def scores_body(
    call: RankingCall, request_id: str, pooled: Pooled, scores: Sequence[float]
) -> ScoreList:
    """The response of /v1/score."""
    data: list[ScoreItem] = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": data,
        "usage": usage_of(pooled),
    }


def ranking_body(
    call: RankingCall, request_id: str, pooled: Pooled, scores: Sequence[float]
) -> Ranking:
    """The response of /v1/rerank, best first."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[Ranked] = [
        {"index": index, "relevance_score": scores[index]} for index in order[: call.num_best]
    ]
    if call.documents:
        for ranked in results:
            ranked["document"] = call.documents[ranked["index"]]
    return {
        "id": f"rerank-{request_id}",
        "model": call.model,
        "usage": usage_of(pooled),
        "results": results,
    }


def _side(body: Body, names: tuple[str, str]) -> tuple[str, list[str]]:
    """The texts under either name, and the name that was used."""
    found = [(name, value) for name in names if (value := body.raw(name)) is not None]
    if len(found) != 1:
        why = f"send exactly one of {' and '.join(names)}"
        raise InvalidRequest.field(names[0], "", why)
    name, value = found[0]
    return name, _texts([value] if isinstance(value, str) else value, name)


def _texts(value: Any, field: str) -> list[str]:
    """The texts of a list of texts or of objects with one. Raises: InvalidRequest."""
    if not isinstance(value, list):
        raise bad_type(field, value, "a list of texts")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise InvalidRequest.field(field, len(value), f"must hold 1 to {MAX_PROMPTS} texts")
    return [_text(each, f"{field}[{index}]") for index, each in enumerate(value)]


def _text(value: Any, field: str) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise bad_type(field, text, "a text that is not empty, or an object with one as text")
    return text
