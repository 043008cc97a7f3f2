"""Between wire messages and the worker's own types."""

from __future__ import annotations

import time
from typing import cast

from loraplex.convert import geometry_to_proto
from loraplex.v1 import common_pb2, worker_pb2
from loraplex.wire_errors import to_detail
from loraplex_services.worker.config import WorkerConfig
from loraplex_services.worker.server.base_files import TokenizerBundle
from loraplex_services.worker.server.sessions import StepNews
from loraplex_services.worker.server.status import StatusNews
from loraplex_services.worker.types.messages import EngineLoad, Residency, Submit, TokenOutput
from loraplex_services.worker.types.request import (
    AdapterSet,
    Grammar,
    GrammarTokens,
    Pooling,
    SamplingParams,
)
from loraplex_services.worker.types.runner_protocol import ModelInfo
from loraplex_services.worker.types.step_plan import Logprobs


def submit_from_wire(message: worker_pb2.WorkerRequest) -> Submit:
    """A request as the engine takes it; its values are still unchecked."""
    adapters = sorted((a.digest, a.weight) for a in message.adapters)
    return Submit(
        request_id=message.request_id,
        prompt_ids=list(message.prompt_ids),
        output_ids=list(message.output_ids),
        sampling=_sampling_from_wire(message.sampling),
        adapters=AdapterSet(tuple(adapters)),
        tenant=message.tenant,
        priority=message.priority,
        fairness_weight=message.fairness_weight or 1.0,
        cache_salt=message.cache_salt or message.tenant,
        sample_index=message.sample_index,
        remaining_s=message.remaining_s or None,
        grammar=_grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
        grammar_tokens=GrammarTokens(
            tuple((t.token_id, t.content) for t in message.grammar_tokens if not t.special),
            tuple(message.grammar_eos_ids),
        ),
        pooling=_pooling_from_wire(message),
        remaining_first_token_s=message.remaining_first_token_s or None,
        came_s=time.monotonic(),
    )


_POOLINGS = {
    common_pb2.POOLING_LAST: Pooling.LAST,
    common_pb2.POOLING_MEAN: Pooling.MEAN,
    common_pb2.POOLING_HEAD: Pooling.HEAD,
}


def _pooling_from_wire(message: worker_pb2.WorkerRequest) -> Pooling:
    """Gateways before `pooling` say `pools`."""
    unsaid = Pooling.LAST if message.pools else Pooling.NONE
    return _POOLINGS.get(message.pooling, unsaid)


def _grammar_from_wire(message: common_pb2.Grammar) -> Grammar:
    """A message without a form becomes a grammar of no form, which intake refuses."""
    form = message.WhichOneof("form") or ""
    texts = message.choice.options if form == "choice" else [getattr(message, form)] if form else []
    return Grammar(form, tuple(texts))


def _sampling_from_wire(message: worker_pb2.WorkerSampling) -> SamplingParams:
    """Unset (0) top_p and repetition_penalty mean that they are off."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_token_ids=tuple(message.bad_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def events_to_wire(news: StepNews) -> worker_pb2.StepEvents:
    """One step's news for one session."""
    return worker_pb2.StepEvents(
        step=news.step,
        tokens=[token_to_wire(request_id, output) for request_id, output in news.tokens],
        failures=[
            worker_pb2.RequestFailure(request_id=request_id, error=to_detail(error))
            for request_id, error in news.failures
        ],
    )


def token_to_wire(request_id: str, output: TokenOutput) -> worker_pb2.TokenEvent:
    """Tokens of one request."""
    event = worker_pb2.TokenEvent(
        request_id=request_id,
        token_ids=output.token_ids,
        output_position=output.output_position,
        finish_reason=cast("common_pb2.FinishReason", output.finish_reason),
        stop_token_id=output.stop_token_id,
        logprobs=[_logprobs_to_wire(entry) for entry in output.logprobs],
        cached_tokens=output.cached_tokens,
        pooled=output.pooled,
    )
    if output.prompt_logprobs is not None:
        event.prompt_logprobs.add()
        event.prompt_logprobs.extend(_logprobs_to_wire(p) for p in output.prompt_logprobs)
    if output.finish_reason:
        event.timings.queue_s = output.queue_s
        event.timings.load_s = output.load_s
        event.timings.prefill_s = output.prefill_s
    return event


def _logprobs_to_wire(logprobs: Logprobs) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token=common_pb2.TokenCandidate(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenCandidate(token_id=i, logprob=value) for i, value in logprobs.top],
    )


def residency_to_wire(entry: Residency) -> worker_pb2.AdapterResidency:
    """Where an adapter is; the tiers have the same numbers."""
    return worker_pb2.AdapterResidency(
        digest=entry.digest,
        tier=cast("worker_pb2.AdapterTier", entry.tier),
        max_rank=entry.max_rank,
        device_bytes=entry.device_bytes,
        pinned=entry.pinned,
        running_requests=entry.running_requests,
    )


def status_to_wire(news: StatusNews, config: WorkerConfig) -> worker_pb2.WatchStatusResponse:
    """One status message."""
    return worker_pb2.WatchStatusResponse(
        worker_id=config.worker_id,
        epoch=news.epoch,
        sequence=news.sequence,
        full=news.is_full,
        ready=news.is_ready,
        draining=news.is_draining,
        load=_load_to_wire(news.load),
        adapters=[residency_to_wire(entry) for entry in news.adapters],
        base_id=config.base_id,
    )


def _load_to_wire(load: EngineLoad) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        step_s=load.step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        max_distinct_adapters=load.max_distinct_adapters,
        steps=load.steps,
        max_running_requests=load.max_running,
        full=load.is_full,
    )


def model_to_wire(
    config: WorkerConfig,
    info: ModelInfo,
    bundle: TokenizerBundle,
    *,
    with_tokenizer: bool,
) -> worker_pb2.GetModelResponse:
    """What a gateway needs to know of the base."""
    files = bundle.files if with_tokenizer else ()
    return worker_pb2.GetModelResponse(
        base_id=config.base_id,
        geometry=geometry_to_proto(info.geometry),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=bundle.bos_token_id,
        max_lora_rank=config.max_lora_rank,
        dtype=info.dtype,
        device=info.device,
        numerics_fingerprint=info.numerics_fingerprint,
        tokenizer_digest=bundle.digest,
        tokenizer_files=[worker_pb2.TokenizerFile(name=n, content=c) for n, c in files],
        generation_config_json=bundle.generation_config_json,
        worker_id=config.worker_id,
        pad_token_id=bundle.pad_token_id,
        base_aliases=config.base_aliases,
        caps_context=info.caps_context,
    )
