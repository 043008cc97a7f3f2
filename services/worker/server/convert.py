"""Converts between wire messages and the worker's types."""

from __future__ import annotations

from loraplex.api.error_wire import to_detail
from loraplex.api.format_wire import geometry_to_proto
from loraplex.api.wire import (
    finish_reason_to_proto,
    load_to_proto,
    logprob_to_proto,
    residency_to_proto,
    routed_experts_to_proto,
    to_message,
)
from loraplex.v1 import common_pb2, worker_pb2
from loraplex_services.worker.config import WorkerConfig
from loraplex_services.worker.server.base_files import TokenizerBundle
from loraplex_services.worker.server.sessions import SessionUpdate
from loraplex_services.worker.server.status import StatusUpdate
from loraplex_services.worker.types.messages import TokenOutput
from loraplex_services.worker.types.runner_protocol import ModelInfo


def events_to_wire(update: SessionUpdate) -> worker_pb2.StepEvents:
    """The events of one step for one session."""
    events = worker_pb2.StepEvents(
        step=update.step,
        failures=[
            worker_pb2.RequestFailure(request_id=request_id, error=to_detail(error))
            for request_id, error in update.failures
        ],
    )
    for request_id, output in update.tokens:
        _write(events.tokens.add(), request_id, output)
    return events


def token_to_wire(request_id: str, output: TokenOutput) -> worker_pb2.TokenEvent:
    """Tokens of one request."""
    event = worker_pb2.TokenEvent()
    _write(event, request_id, output)
    return event


def _write(event: worker_pb2.TokenEvent, request_id: str, output: TokenOutput) -> None:
    """Fill an empty event. Most have the first three fields only."""
    event.request_id = request_id
    event.token_ids.extend(output.token_ids)
    event.output_position = output.output_position
    if output.finish_reason is not None:
        event.finish_reason = finish_reason_to_proto(output.finish_reason)
    if output.stop_token_id is not None:
        event.stop_token_id = output.stop_token_id
    if output.logprobs:
        event.logprobs.extend(map(logprob_to_proto, output.logprobs))
    if output.cached_tokens:
        event.cached_tokens = output.cached_tokens
    if output.pooled:
        event.pooled.extend(output.pooled)
    if output.prompt_logprobs is not None:
        packed = to_message(output.prompt_logprobs, worker_pb2.PackedLogprobs)
        event.prompt_logprobs.CopyFrom(packed)
    if output.routed_experts is not None:
        event.routed_experts.CopyFrom(routed_experts_to_proto(output.routed_experts))
    if output.timings is not None:
        event.timings.CopyFrom(to_message(output.timings, common_pb2.Timings))


def status_to_wire(update: StatusUpdate, config: WorkerConfig) -> worker_pb2.WatchStatusResponse:
    """One status message."""
    return worker_pb2.WatchStatusResponse(
        worker_id=config.worker_id,
        epoch=update.epoch,
        sequence=update.sequence,
        full=update.is_full,
        ready=update.is_ready,
        draining=update.is_draining,
        load=load_to_proto(update.load),
        adapters=[residency_to_proto(entry) for entry in update.adapters],
        base_id=config.base_id,
    )


def model_to_wire(
    config: WorkerConfig,
    info: ModelInfo,
    bundle: TokenizerBundle,
    *,
    with_tokenizer: bool,
) -> worker_pb2.GetModelResponse:
    """The facts about the base that a gateway needs."""
    files = bundle.files if with_tokenizer else ()
    return worker_pb2.GetModelResponse(
        base_id=config.base_id,
        geometry=geometry_to_proto(info.geometry),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=bundle.bos_token_id,
        max_lora_rank=config.engine.max_lora_rank,
        dtype=info.dtype,
        device=info.device,
        numerics_fingerprint=info.numerics_fingerprint,
        tokenizer_digest=bundle.digest,
        tokenizer_files=[worker_pb2.TokenizerFile(name=n, content=c) for n, c in files],
        generation_config_json=bundle.generation_config_json,
        worker_id=config.worker_id,
        pad_token_id=bundle.pad_token_id,
        base_aliases=config.base_aliases,
        kernels=info.kernels,
        quantization=info.quantization,
        caps_context=info.caps_context,
        routing_bytes=0 if info.routing is None else info.routing.token_bytes,
    )
