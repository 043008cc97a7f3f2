"""The attributes of a request's span: models, digests, counts and outcome, never its text.

Names that begin with `gen_ai` are those of OpenTelemetry's conventions.
"""

from __future__ import annotations

from typing import Any

from loraplex.api.request import ChatPrompt
from loraplex.errors import LoraplexError
from loraplex_services.common.telemetry.tracing import Span
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import GenerateCall


def end_refused(span: Span, call: GenerateCall, error: LoraplexError) -> None:
    """End the span of a request that was refused. What it names as its model is left out."""
    span.end(now_s(), error.reason.lower(), _caller(call))


def end_span(prepared: PreparedRequest, outcome: str) -> None:
    """End the span of a request that was run."""
    usage = prepared.usage
    attributes = _caller(prepared.call) | {
        "gen_ai.operation.name": _operation(prepared),
        "gen_ai.request.model": prepared.base.base_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "loraplex.adapter.names": list(prepared.labels.values()),
        "loraplex.adapter.digests": list(prepared.labels),
        "loraplex.cached_tokens": usage.cached_tokens,
    }
    prepared.span.end(now_s(), outcome, attributes)


def _caller(call: GenerateCall) -> dict[str, Any]:
    return {"loraplex.request_id": call.request_id, "loraplex.tenant": call.tenant}


def _operation(prepared: PreparedRequest) -> str:
    if prepared.pooling:
        return "embeddings"
    return "chat" if isinstance(prepared.call.prompt, ChatPrompt) else "text_completion"
