"""Converts between workers' messages and the gateway's plain types."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from loraplex.v1 import common_pb2, worker_pb2
from loraplex_services.gateway.request import (
    FinishReason,
    Grammar,
    Pooling,
    Sampling,
    ServedModel,
    Timings,
    TokenLogprob,
    Tokens,
    WorkerJob,
)
from loraplex_services.gateway.workers.view import AdapterResidency, Tier, WorkerLoad

_FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_POOLINGS = {
    Pooling.NONE: common_pb2.POOLING_UNSPECIFIED,
    Pooling.LAST: common_pb2.POOLING_LAST,
    Pooling.MEAN: common_pb2.POOLING_MEAN,
    Pooling.HEAD: common_pb2.POOLING_HEAD,
}


def base_from_wire(message: worker_pb2.GetModelResponse, now_unix_s: float) -> ServedModel:
    """The model of a worker."""
    return ServedModel(
        base_id=message.base_id,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        caps_context=message.caps_context,
        eos_token_ids=tuple(message.eos_token_ids),
        pad_token_id=message.pad_token_id if message.HasField("pad_token_id") else None,
        max_lora_rank=message.max_lora_rank,
        fingerprint=message.geometry.fingerprint,
        dtype=message.dtype,
        tokenizer_digest=message.tokenizer_digest,
        default_sampling=default_sampling(message.generation_config_json),
        created_unix_s=int(now_unix_s),
    )


def load_from_wire(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    """A worker's load report."""
    return WorkerLoad(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_tokens=message.queued_tokens,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        step_s=message.step_s,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        max_distinct_adapters=message.max_distinct_adapters,
        steps=message.steps,
        max_running_requests=message.max_running_requests,
        is_full=message.full,
    )


def residency_from_wire(message: worker_pb2.AdapterResidency) -> AdapterResidency:
    """Where one adapter is."""
    return AdapterResidency(
        digest=message.digest,
        tier=Tier(message.tier),
        max_rank=message.max_rank,
        device_bytes=message.device_bytes,
        pinned=message.pinned,
        running_requests=message.running_requests,
    )


def job_to_wire(job: WorkerJob, request_id: str, now_s: float) -> worker_pb2.WorkerRequest:
    """A job as a worker's request under the session's own id."""
    return worker_pb2.WorkerRequest(
        request_id=request_id,
        tenant=job.tenant,
        priority=job.priority,
        fairness_weight=job.fairness_weight,
        cache_salt=job.cache_salt,
        remaining_s=max(job.deadline_s - now_s, 0.001),
        trace=job.trace,
        prompt_ids=job.prompt_ids,
        output_ids=job.output_ids,
        adapters=[worker_pb2.WorkerAdapter(digest=a.digest, weight=a.weight) for a in job.adapters],
        sampling=_sampling_to_wire(job.sampling),
        sample_index=job.sample_index,
        grammar=None if job.grammar is None else _grammar_to_wire(job.grammar),
        grammar_tokens=[
            worker_pb2.GrammarToken(token_id=t.token_id, content=t.content, special=t.special)
            for t in job.grammar_tokens.added
        ],
        grammar_eos_ids=job.grammar_tokens.eos_ids,
        remaining_first_token_s=_first_token_left_s(job, now_s),
        pools=job.pooling is Pooling.LAST,
        pooling=_POOLINGS[job.pooling],
    )


def _first_token_left_s(job: WorkerJob, now_s: float) -> float:
    """0 if the first token was sent already, or if only the deadline limits it."""
    if job.first_token_due_s is None or job.output_ids:
        return 0.0
    return max(job.first_token_due_s - now_s, 0.001)


def tokens_from_wire(event: worker_pb2.TokenEvent, worker_id: str) -> Tokens:
    """One request's share of a step."""
    finish = _FINISH.get(event.finish_reason)
    return Tokens(
        token_ids=tuple(event.token_ids),
        position=event.output_position,
        logprobs=_logprobs_from_wire(event.logprobs) if event.logprobs else (),
        finish_reason=finish,
        stop_token_id=event.stop_token_id if event.HasField("stop_token_id") else None,
        prompt_logprobs=_prompt_logprobs(event.prompt_logprobs) if event.prompt_logprobs else (),
        cached_tokens=event.cached_tokens,
        timings=_timings(event.timings) if finish is not None else None,
        worker_id=worker_id,
        pooled=tuple(event.pooled),
    )


def _grammar_to_wire(grammar: Grammar) -> common_pb2.Grammar:
    if grammar.form == "choice":
        return common_pb2.Grammar(choice=common_pb2.GrammarChoice(options=grammar.texts))
    forms: dict[str, Any] = {grammar.form: grammar.texts[0]}
    return common_pb2.Grammar(**forms)


def _sampling_to_wire(sampling: Sampling) -> worker_pb2.WorkerSampling:
    return worker_pb2.WorkerSampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_token_ids=sampling.bad_token_ids,
    )


def _logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.token.token_id,
        message.token.logprob,
        tuple((top.token_id, top.logprob) for top in message.top),
    )


def _logprobs_from_wire(
    messages: Iterable[common_pb2.TokenLogprob],
) -> tuple[TokenLogprob, ...]:
    return tuple(_logprob(message) for message in messages)


def _prompt_logprobs(
    messages: Iterable[common_pb2.TokenLogprob],
) -> tuple[TokenLogprob | None, ...]:
    return tuple(_logprob(m) if m.HasField("token") else None for m in messages)


def _timings(message: common_pb2.Timings) -> Timings:
    return Timings(message.queue_s, message.load_s, message.prefill_s)


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
