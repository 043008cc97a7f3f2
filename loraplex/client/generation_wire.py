"""Converts generation requests to messages, and the answers of gateways to plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraplex.api.output import ServedBy, Timings, Usage
from loraplex.api.request import (
    ChatPrompt,
    GenerateRequest,
    RequestedAdapter,
    TextPrompt,
    TokenPrompt,
)
from loraplex.api.request_wire import generate_request_from_proto, generate_request_to_proto
from loraplex.api.sampling import Sampling
from loraplex.api.wire import (
    finish_reason_from_proto,
    from_message,
    load_from_proto,
    logprobs_from_proto,
    prompt_logprobs_from_proto,
    recent_load_from_proto,
    residency_from_proto,
    routed_experts_from_proto,
)
from loraplex.client.generation import (
    CompletionChunk,
    Message,
    Mirrored,
    Prompt,
    ResidentAdapter,
    Status,
    WorkerStatus,
)
from loraplex.errors import InvalidRequest
from loraplex.v1 import admin_pb2
from loraplex.v1 import inference_pb2 as pb


def generate_request(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    adapters: Mapping[str, float] | None = None,
    **others: Any,
) -> pb.GenerateRequest:
    """The wire form of one request; `others` are further fields of `api.request.GenerateRequest`.

    Raises:
        InvalidRequest: the prompt mixes forms, or the wire cannot carry a value.
    """
    requested = tuple(RequestedAdapter(ref, weight) for ref, weight in (adapters or {}).items())
    request = GenerateRequest(
        model=model, prompt=to_prompt(prompt), sampling=sampling, adapters=requested, **others
    )
    return generate_request_to_proto(request)


def to_prompt(prompt: Prompt) -> TextPrompt | TokenPrompt | ChatPrompt:
    """A prompt of any form. Raises: InvalidRequest if it mixes forms."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    messages = [turn for turn in prompt if isinstance(turn, Message)]
    token_ids = [turn for turn in prompt if isinstance(turn, int)]
    if messages and not token_ids:
        turns = tuple({"role": turn.role, "content": turn.content} for turn in messages)
        return ChatPrompt(turns)
    if len(token_ids) == len(prompt):
        return TokenPrompt(tuple(token_ids))
    raise InvalidRequest("prompt: give text, token ids or messages, not a mixture")


def chunk(message: pb.GenerateResponse) -> CompletionChunk:
    """One message of a stream."""
    return CompletionChunk(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        reasoning=message.reasoning,
        digests=tuple(message.digests),
        logprobs=logprobs_from_proto(message.logprobs),
        prompt_token_ids=tuple(message.prompt_token_ids),
        prompt_logprobs=prompt_logprobs_from_proto(message.prompt_logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        stop_reason=message.stop_reason,
        served_by=from_message(message.served_by, ServedBy)
        if message.HasField("served_by")
        else None,
        usage=from_message(message.usage, Usage) if message.HasField("usage") else None,
        timings=from_message(message.timings, Timings) if message.HasField("timings") else None,
        routed_experts=routed_experts_from_proto(message.routed_experts)
        if message.HasField("routed_experts")
        else None,
    )


def mirrored(message: admin_pb2.MirrorRequestsResponse) -> Mirrored:
    """A request that a gateway mirrors."""
    request = generate_request_from_proto(message.request)
    assert isinstance(request.prompt, TokenPrompt), "gateways send token ids"
    return Mirrored(
        prompt_ids=request.prompt.ids,
        prompt_text=message.prompt_text,
        sampling=request.sampling,
        token_ids=tuple(message.token_ids),
        text=message.text,
        digest=message.digest,
    )


def status(message: admin_pb2.GetStatusResponse) -> Status:
    """A gateway's view of its stack."""
    has_recent = message.HasField("recent")
    return from_message(
        message,
        Status,
        workers=tuple(_worker(worker) for worker in message.workers),
        recent=recent_load_from_proto(message.recent) if has_recent else None,
    )


def _worker(message: admin_pb2.WorkerState) -> WorkerStatus:
    adapters = tuple(
        from_message(each, ResidentAdapter, residency=residency_from_proto(each.residency))
        for each in message.adapters
    )
    return from_message(
        message, WorkerStatus, load=load_from_proto(message.load), adapters=adapters
    )
