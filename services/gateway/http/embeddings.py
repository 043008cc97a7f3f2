"""/v1/embeddings: returns vectors as numbers or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from loraplex.api.pooling import Pooling
from loraplex.api.request import Prompt
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.calls import Origin, model_of, split_key_of
from loraplex_services.gateway.http.formatting import UsageInfo
from loraplex_services.gateway.http.prompts import parse_inputs
from loraplex_services.gateway.pipeline.embedding import NO_OUTPUT, Finish, Pooled
from loraplex_services.gateway.request import GenerateCall

POOLINGS = {"": Pooling.DEFAULT, "last": Pooling.LAST, "mean": Pooling.MEAN}


@dataclass(frozen=True, slots=True)
class EmbeddingsCall:
    """One HTTP request: a call per input."""

    model: str
    calls: tuple[GenerateCall, ...]
    finish: Finish
    is_base64: bool
    field_names: dict[str, str]
    """Names that the caller uses for our fields."""


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: Sequence[float] | str


class EmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: UsageInfo


def parse_embeddings(fields: dict[str, Any], origin: Origin) -> EmbeddingsCall:
    """Body of /v1/embeddings. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model = model_of(body)
    prompts, field = parse_inputs(body, fields)
    truncation = body.integer("truncate_prompt_tokens")
    encoding = body.text("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidRequest.field("encoding_format", encoding, "must be float or base64")
    pooling = POOLINGS.get(asked := (body.text("pooling") or "").lower())
    if pooling is None:
        raise InvalidRequest.field("pooling", asked, "must be last or mean")
    dimensions = body.integer("dimensions")
    if dimensions is not None and dimensions < 1:
        raise InvalidRequest.field("dimensions", dimensions, "must be at least 1")
    normalize = body.flag("normalize") if fields.get("normalize") is not None else None
    body.finish()
    calls = vector_calls(fields, origin, model, prompts, pooling, truncation)
    finish = Finish(normalize, dimensions or 0)
    return EmbeddingsCall(model, calls, finish, encoding == "base64", {"prompt": field})


def vector_calls(
    fields: dict[str, Any],
    origin: Origin,
    model: str,
    prompts: Sequence[Prompt],
    pooling: Pooling,
    truncate_prompt_tokens: int | None,
) -> tuple[GenerateCall, ...]:
    """A call per prompt of one HTTP request."""
    return tuple(
        GenerateCall(
            request_id=origin.request_id if len(prompts) == 1 else f"{origin.request_id}-{index}",
            tenant=origin.tenant,
            runs_all=origin.runs_all,
            model=model,
            prompt=prompt,
            sampling=NO_OUTPUT,
            split_key=split_key_of(fields, origin, prompt),
            timeout_s=origin.timeout_s,
            trace=origin.trace,
            priority=origin.priority or 0,
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        for index, prompt in enumerate(prompts)
    )


def embeddings_body(call: EmbeddingsCall, pooled: Pooled) -> EmbeddingResponse:
    """The response body."""
    data: list[Embedding] = [
        {
            "object": "embedding",
            "index": index,
            "embedding": encoded(vector, is_base64=call.is_base64),
        }
        for index, vector in enumerate(pooled.vectors)
    ]
    return {"object": "list", "data": data, "model": call.model, "usage": usage_of(pooled)}


def usage_of(pooled: Pooled) -> UsageInfo:
    """The `usage` of calls for vectors."""
    count = pooled.usage.prompt_tokens
    return {"prompt_tokens": count, "total_tokens": count}


def encoded(vector: Sequence[float], *, is_base64: bool) -> Sequence[float] | str:
    """The numbers, or base64 of little-endian float32."""
    if not is_base64:
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
