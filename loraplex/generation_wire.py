"""Generation requests to wire messages, and what gateways answer back to plain values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from loraplex.errors import InvalidRequest
from loraplex.generation import (
    Candidate,
    Grammar,
    Message,
    Piece,
    Prompt,
    ResidentAdapter,
    Sampling,
    ServedBy,
    Status,
    Timings,
    TokenLogprob,
    Usage,
    WorkerStatus,
)
from loraplex.v1 import admin_pb2, common_pb2, worker_pb2
from loraplex.v1 import inference_pb2 as pb

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_TIERS = {
    worker_pb2.ADAPTER_TIER_DISK: "disk",
    worker_pb2.ADAPTER_TIER_LOADING: "loading",
    worker_pb2.ADAPTER_TIER_DEVICE: "device",
}


def generate_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    adapters: Mapping[str, float] | None = None,
    first_token_s: float | None = None,
) -> pb.GenerateRequest:
    """The wire form of one request."""
    request = pb.GenerateRequest(model=model, sampling=_sampling(sampling))
    request.first_token_s = first_token_s or 0.0
    for ref, weight in (adapters or {}).items():
        request.adapters.add(ref=ref, weight=weight)
    prompt_into(request, prompt)
    return request


def prompt_into(message: pb.GenerateRequest | pb.Prompt, prompt: Prompt) -> None:
    """Put a prompt of any form into a message. Mutates it.

    Raises:
        InvalidRequest: it mixes forms, or has token ids that the wire cannot carry.
    """
    if isinstance(prompt, str):
        message.text = prompt
        return
    messages = [turn for turn in prompt if isinstance(turn, Message)]
    token_ids = [turn for turn in prompt if isinstance(turn, int)]
    if messages and not token_ids:
        message.chat.messages.extend(
            pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages
        )
    elif len(token_ids) == len(prompt):
        try:
            message.token_ids.ids.extend(token_ids)
        except ValueError:
            raise InvalidRequest("prompt: token ids are 0 to 4294967295") from None
    else:
        raise InvalidRequest("prompt: give text, token ids or messages, not a mixture")


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    """Field by field, so that a value the wire cannot carry is named."""
    params = pb.SamplingParams()
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if value is None:
            continue
        if isinstance(value, Grammar):
            params.grammar.CopyFrom(_grammar(value))
            continue
        try:
            params.MergeFrom(pb.SamplingParams(**{field.name: value}))
        except (ValueError, TypeError):
            raise InvalidRequest.field(
                field.name, value, "is out of range or of another type; see Sampling"
            ) from None
    return params


def _grammar(grammar: Grammar) -> common_pb2.Grammar:
    """Raises InvalidRequest unless exactly one form is given."""
    fields = [(f.name, getattr(grammar, f.name)) for f in dataclasses.fields(grammar)]
    given = [(name, value) for name, value in fields if value is not None]
    if len(given) != 1:
        names = ", ".join(name for name, _ in given) or "nothing"
        raise InvalidRequest.field(
            "grammar", names, "set exactly one of json_schema, regex, ebnf and choice"
        )
    [(name, value)] = given
    if name == "choice":
        return common_pb2.Grammar(choice=common_pb2.GrammarChoice(options=value))
    if isinstance(value, Mapping):
        value = json.dumps(value)
    form: dict[str, Any] = {name: value}
    return common_pb2.Grammar(**form)


def piece(message: pb.GenerateResponse) -> Piece:
    """One message of a stream."""
    return Piece(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        prompt_token_ids=tuple(message.prompt_token_ids),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
        finish_reason=_FINISH.get(message.finish_reason, ""),
        stop_reason=message.stop_reason,
        served_by=served_by(message.served_by) if message.HasField("served_by") else None,
        usage=usage(message.usage) if message.HasField("usage") else None,
        timings=_timings(message.timings) if message.HasField("timings") else None,
    )


def _logprobs(messages: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            Candidate(m.token.token_id, m.token.logprob),
            tuple(Candidate(c.token_id, c.logprob) for c in m.top),
        )
        for m in messages
    )


def served_by(message: pb.ServedBy) -> ServedBy:
    """What ran."""
    return ServedBy(
        tuple(message.adapters), tuple(message.digests), message.worker_id, message.base_id
    )


def usage(message: common_pb2.Usage) -> Usage:
    """Tokens consumed."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def _timings(message: common_pb2.Timings) -> Timings:
    return Timings(message.queue_s, message.load_s, message.prefill_s)


def status(message: admin_pb2.GetStatusResponse) -> Status:
    """A gateway's view of its stack."""
    return Status(
        ready=message.ready,
        not_ready_reason=message.not_ready_reason,
        base_ids=tuple(message.base_ids),
        registry_connected=message.registry_connected,
        num_adapters=message.num_adapters,
        running_requests=message.running_requests,
        queued_requests=message.queued_requests,
        workers=tuple(_worker(worker) for worker in message.workers),
    )


def _worker(message: admin_pb2.WorkerState) -> WorkerStatus:
    load = message.load
    return WorkerStatus(
        worker_id=message.worker_id,
        address=message.address,
        base_id=message.base_id,
        connected=message.connected,
        ready=message.ready,
        draining=message.draining,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        queued_tokens=load.queued_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        step_s=load.step_s,
        steps=load.steps,
        max_distinct_adapters=load.max_distinct_adapters,
        num_adapters_on_device=message.num_adapters_on_device,
        adapters=tuple(_resident(adapter) for adapter in message.adapters),
        dtype=message.dtype,
        kernels=message.kernels,
    )


def _resident(message: admin_pb2.ResidentAdapter) -> ResidentAdapter:
    where = message.residency
    return ResidentAdapter(
        ref=message.ref,
        digest=where.digest,
        tier=_TIERS.get(where.tier, ""),
        max_rank=where.max_rank,
        device_bytes=where.device_bytes,
        pinned=where.pinned,
        running_requests=where.running_requests,
    )
