"""Converts the messages of Embed and Score."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from loraplex.api.pooling import Pooling
from loraplex.api.request import Prompt, TextPrompt
from loraplex.api.request_wire import prompt_from_proto
from loraplex.api.wire import pooling_from_proto, to_message
from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, inference_pb2
from loraplex_services.common.callers import current_caller
from loraplex_services.gateway.pipeline.embedding import NO_OUTPUT, Finish, Pooled
from loraplex_services.gateway.pipeline.pooling import labels_of
from loraplex_services.gateway.pipeline.scoring import PromptScore
from loraplex_services.gateway.registry.keyring import runs_all_adapters
from loraplex_services.gateway.request import GenerateCall, beginning_hash

MAX_INPUTS = 1024

Request = inference_pb2.EmbedRequest | inference_pb2.ScoreRequest


def field_names(request: Request) -> Mapping[str, str]:
    """Names that the caller of this request uses for our fields."""
    return {"prompt": "prompts" if request.prompts else "inputs"}


def embed_calls(
    request: inference_pb2.EmbedRequest, timeout_s: float | None, trace: str
) -> tuple[list[GenerateCall], Finish]:
    """Calls of the current caller, one per input. Raises: InvalidRequest."""
    pooling = pooling_from_proto(request.pooling)
    if pooling is None or pooling is Pooling.HEAD:
        why = "must be POOLING_LAST, POOLING_MEAN or unset; heads answer Score"
        raise InvalidRequest.field("pooling", request.pooling, why)
    normalize = request.normalize if request.HasField("normalize") else None
    finish = Finish(normalize, request.dimensions)
    return _calls(request, pooling or Pooling.DEFAULT, timeout_s, trace), finish


def score_calls(
    request: inference_pb2.ScoreRequest, timeout_s: float | None, trace: str
) -> list[GenerateCall]:
    """Calls of the current caller, one per input. Raises: InvalidRequest."""
    return _calls(request, Pooling.HEAD, timeout_s, trace)


def _calls(
    request: Request, pooling: Pooling, timeout_s: float | None, trace: str
) -> list[GenerateCall]:
    request_id, caller = secrets.token_hex(8), current_caller.get()
    return [
        GenerateCall(
            request_id=f"{request_id}-{index}",
            tenant=caller.tenant,
            runs_all=runs_all_adapters(caller),
            model=request.model,
            prompt=prompt,
            sampling=NO_OUTPUT,
            split_key=beginning_hash(prompt),
            timeout_s=timeout_s,
            trace=trace,
            pooling=pooling,
        )
        for index, prompt in enumerate(_prompts(request))
    ]


def _prompts(request: Request) -> list[Prompt]:
    if request.inputs and request.prompts:
        raise InvalidRequest.field("prompts", "", "send inputs or prompts, not both")
    count = len(request.inputs) + len(request.prompts)
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest.field("inputs", count, f"must hold 1 to {MAX_INPUTS} inputs")
    if request.inputs:
        return [TextPrompt(text) for text in request.inputs]
    return [
        prompt_from_proto(prompt, f"prompts[{index}]", generates=False)
        for index, prompt in enumerate(request.prompts)
    ]


def embed_response(pooled: Pooled) -> inference_pb2.EmbedResponse:
    """Vectors in input order."""
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=vector) for vector in pooled.vectors],
        usage=to_message(pooled.usage, common_pb2.Usage),
        served_by=to_message(pooled.served_by, inference_pb2.ServedBy),
    )


def score_response(pooled: Pooled, scores: Sequence[PromptScore]) -> inference_pb2.ScoreResponse:
    """Scores in input order."""
    return inference_pb2.ScoreResponse(
        scores=[to_message(score, inference_pb2.Score) for score in scores],
        usage=to_message(pooled.usage, common_pb2.Usage),
        labels=labels_of(pooled.prepared[0].target.adapters[0]),
        served_by=to_message(pooled.served_by, inference_pb2.ServedBy),
    )
