"""/v1/embeddings: bodies in, vectors out as numbers or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.errors import InvalidRequest, Unsupported
from services.gateway.embedding import embed_call
from services.gateway.openai.body import Body
from services.gateway.openai.calls import Origin, parse_prompts, split_key_of
from services.gateway.request import GenerateCall

FIELD_NAMES = {"prompt": "input"}
"""Our field names as the caller spells them."""


@dataclass(frozen=True, slots=True)
class EmbeddingsCall:
    """One HTTP request: a call per input."""

    model: str
    calls: tuple[GenerateCall, ...]
    is_base64: bool


def parse_embeddings(fields: dict[str, Any], origin: Origin) -> EmbeddingsCall:
    """Body of /v1/embeddings. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model = body.text("model")
    if not model:
        raise InvalidRequest.field("model", model or "", "name a base or an adapter")
    special = body.flag("add_special_tokens", default=True)
    prompts = parse_prompts("input", body.raw("input"), special)
    encoding = body.text("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidRequest.field("encoding_format", encoding, "must be float or base64")
    if (dimensions := body.whole("dimensions")) is not None:
        raise Unsupported.field(
            "dimensions", dimensions, "vectors have the model's hidden size; leave it out"
        )
    body.finish()
    calls = tuple(
        embed_call(
            origin.request_id if len(prompts) == 1 else f"{origin.request_id}-{place}",
            origin.tenant,
            model,
            prompt,
            split_key=split_key_of(fields, origin, prompt),
            timeout_s=origin.timeout_s,
            trace=origin.trace,
        )
        for place, prompt in enumerate(prompts)
    )
    return EmbeddingsCall(model, calls, encoding == "base64")


def print_embeddings(
    call: EmbeddingsCall, vectors: Sequence[Sequence[float]], num_tokens: int
) -> dict[str, Any]:
    """The response body."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if call.is_base64 else list(vector),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": call.model, "usage": usage}


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
