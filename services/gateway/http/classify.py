"""/classify in vLLM's shape: returns labels and their probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from loraplex.api.pooling import Pooling
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.calls import Origin, model_of
from loraplex_services.gateway.http.embeddings import usage_of, vector_calls
from loraplex_services.gateway.http.formatting import UsageInfo
from loraplex_services.gateway.http.prompts import parse_inputs
from loraplex_services.gateway.pipeline.embedding import Pooled
from loraplex_services.gateway.pipeline.scoring import PromptScore
from loraplex_services.gateway.request import GenerateCall


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """One HTTP request: a call per input."""

    model: str
    calls: tuple[GenerateCall, ...]
    field_names: dict[str, str]
    use_activation: bool
    """False = logits instead of probabilities."""


class Class(TypedDict):
    index: int
    label: str | None
    probs: Sequence[float]
    logits: Sequence[float]
    num_classes: int


class Classes(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: UsageInfo


def parse_classify(fields: dict[str, Any], origin: Origin) -> ClassifyCall:
    """Body of /classify. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model = model_of(body)
    use_activation = body.flag("use_activation", default=True)
    prompts, field = parse_inputs(body, fields)
    truncation = body.integer("truncate_prompt_tokens")
    body.finish()
    calls = vector_calls(fields, origin, model, prompts, Pooling.HEAD, truncation)
    return ClassifyCall(model, calls, {"prompt": field}, use_activation)


def classes_body(
    call: ClassifyCall, request_id: str, pooled: Pooled, scores: Sequence[PromptScore]
) -> Classes:
    """The response body. For a regression it contains the outputs instead of probabilities."""
    data: list[Class] = [
        {
            "index": index,
            "label": score.label or None,
            "probs": shown_scores(call, score),
            "logits": score.logits,
            "num_classes": len(score.logits),
        }
        for index, score in enumerate(scores)
    ]
    return {
        "id": f"classify-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": call.model,
        "data": data,
        "usage": usage_of(pooled),
    }


def shown_scores(call: ClassifyCall, score: PromptScore) -> Sequence[float]:
    """Probabilities, or logits if they are requested or the problem is a regression."""
    return (score.probabilities if call.use_activation else ()) or score.logits
