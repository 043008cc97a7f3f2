"""Converts between messages and requests: submissions, ends of requests, reports."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.api.fields import shared_fields
from loraplex.api.output import FinishReason, Timings
from loraplex.api.residency import AdapterResidency, Tier
from loraplex.errors import LoraplexError
from loraplex_services.worker.types.messages import ResidencyChange, Submit, WireError
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.residency import CachedAdapter


def to_request(command: Submit, now: float) -> Request:
    """The request that a command describes, arriving now."""
    arrival_s = now if command.came_s is None else min(command.came_s, now)
    message = command.request
    left_s, first_token_left_s = message.remaining_s, message.remaining_first_token_s
    shared = shared_fields(message, Request)
    shared["prompt_ids"], shared["output_ids"] = list(message.prompt_ids), list(message.output_ids)
    return Request(
        **shared,
        deadline_s=None if left_s is None else arrival_s + left_s,
        first_token_due_s=None if first_token_left_s is None else arrival_s + first_token_left_s,
        arrival_s=arrival_s,
    )


def finish_reason(request: Request, eos_token_ids: Sequence[int]) -> FinishReason | None:
    """Why the request ends after its last output token; None = it continues."""
    sampling, output_ids = request.sampling, request.output_ids
    num_output = len(output_ids)
    if request.constraint is not None and request.constraint.is_finished:
        return FinishReason.STOP
    if output_ids and num_output >= sampling.min_tokens:
        last = output_ids[-1]
        is_eos = not sampling.ignore_eos and last in (request.own_eos_ids or eos_token_ids)
        if is_eos or last in sampling.stop_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


def stop_token(
    request: Request, reason: FinishReason | None, eos_token_ids: Sequence[int]
) -> int | None:
    """The token that ended the request; None if a finished grammar or a length ended it."""
    if reason is not FinishReason.STOP or not request.output_ids:
        return None
    last = request.output_ids[-1]
    is_end = last in request.eos_ids(eos_token_ids) or last in request.sampling.stop_token_ids
    return last if is_end else None


def timings(request: Request) -> Timings:
    """How the time to the first token was spent."""
    started_s = request.first_scheduled_s or request.arrival_s
    ready_s = request.adapters_ready_s or request.arrival_s
    load_s = ready_s - request.arrival_s if request.adapters.adapters else 0.0
    prefill_s = (request.first_token_s or started_s) - started_s
    return Timings(started_s - request.arrival_s, load_s, prefill_s)


def residency_change(
    digest: str,
    adapter: CachedAdapter | None,
    page_bytes: int,
    host_bytes: int,
    error: LoraplexError | None,
) -> ResidencyChange:
    """How the engine reports where an adapter is; None = it is not known.

    `host_bytes`: of its image in pinned host memory, 0 if it is not there.
    """
    wire_error = WireError.of(error) if error else None
    if adapter is None:
        return ResidencyChange(AdapterResidency(digest, Tier.NONE), wire_error)
    residency = AdapterResidency(
        digest=digest,
        tier=Tier.HOST if adapter.tier is Tier.DISK and host_bytes else adapter.tier,
        max_rank=adapter.max_rank,
        device_bytes=adapter.num_pages * page_bytes if adapter.first_pages else 0,
        pinned=adapter.pinned,
        running_requests=adapter.num_running,
        host_bytes=host_bytes,
    )
    return ResidencyChange(residency, wire_error)
