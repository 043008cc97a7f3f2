"""Converts between workers' messages and the gateway's plain types."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from loraplex.api.output import PackedLogprobs, Timings
from loraplex.api.request_wire import worker_request_to_proto
from loraplex.api.wire import (
    finish_reason_from_proto,
    from_message,
    logprobs_from_proto,
    routed_experts_from_proto,
)
from loraplex.v1 import worker_pb2
from loraplex_services.gateway.request import ServedModel, Tokens, WorkerJob

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def base_from_wire(message: worker_pb2.GetModelResponse, now_unix_s: float) -> ServedModel:
    """The model of a worker."""
    return from_message(
        message,
        ServedModel,
        pad_token_id=message.pad_token_id if message.HasField("pad_token_id") else None,
        fingerprint=message.geometry.fingerprint,
        default_sampling=default_sampling(message.generation_config_json),
        created_unix_s=int(now_unix_s),
    )


def job_to_wire(job: WorkerJob, request_id: str, now_s: float) -> worker_pb2.WorkerRequest:
    """A job as a worker's request under the session's own id."""
    return worker_request_to_proto(
        replace(
            job.request,
            request_id=request_id,
            remaining_s=max(job.deadline_s - now_s, 0.001),
            remaining_first_token_s=_first_token_left_s(job, now_s),
        )
    )


def _first_token_left_s(job: WorkerJob, now_s: float) -> float | None:
    """None if the first token was sent already, or if only the deadline limits it."""
    if job.first_token_due_s is None or job.request.output_ids:
        return None
    return max(job.first_token_due_s - now_s, 0.001)


def tokens_from_wire(
    event: worker_pb2.TokenEvent, worker_id: str, digests: tuple[str, ...] = ()
) -> Tokens:
    """One request's share of a step, which the adapters `digests` computed."""
    finish = finish_reason_from_proto(event.finish_reason)
    return Tokens(
        token_ids=tuple(event.token_ids),
        position=event.output_position,
        logprobs=logprobs_from_proto(event.logprobs) if event.logprobs else (),
        finish_reason=finish,
        stop_token_id=event.stop_token_id if event.HasField("stop_token_id") else None,
        prompt_logprobs=(
            from_message(event.prompt_logprobs, PackedLogprobs)
            if event.HasField("prompt_logprobs")
            else None
        ),
        cached_tokens=event.cached_tokens,
        timings=from_message(event.timings, Timings) if finish is not None else None,
        worker_id=worker_id,
        digests=digests,
        pooled=tuple(event.pooled),
        routed_experts=(
            routed_experts_from_proto(event.routed_experts)
            if event.HasField("routed_experts")
            else None
        ),
    )


def default_sampling(generation_config_json: str) -> dict[str, float]:
    """Sampling defaults of a model's generation_config.json; values of wrong type are skipped."""
    try:
        config = json.loads(generation_config_json or "{}")
    except json.JSONDecodeError:
        return {}
    if not isinstance(config, dict):
        return {}
    return {name: float(config[name]) for name in _MODEL_DEFAULTS if _is_number(config.get(name))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
