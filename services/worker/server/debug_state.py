"""The state of a worker for /debug/state: ids, counts and times, without texts and tokens."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from loraplex.api.residency import AdapterResidency, Tier
from loraplex_services.worker.server.sessions import GatewaySession, ServerRequest, ServerRequests
from loraplex_services.worker.server.status import StatusBoard

MAX_LISTED = 100
"""Most requests, adapters and sessions that are listed; their numbers are always given."""


def worker_state(
    status: StatusBoard,
    engine: dict[str, Any],
    sessions: Iterable[GatewaySession],
    requests: ServerRequests,
    now_s: float,
) -> dict[str, Any]:
    """The state as plain data for JSON. `engine`: what its client says about the process."""
    adapters = list(status.adapters())
    used_most = heapq.nlargest(
        MAX_LISTED, adapters, key=lambda each: (each.running_requests, each.tier, each.device_bytes)
    )
    return {
        "is_ready": status.is_ready,
        "is_draining": status.is_draining,
        "engine": engine | {"epoch": status.epoch},
        "load": dataclasses.asdict(status.load),
        "sessions": [_session(each) for each in islice(sessions, MAX_LISTED)],
        "num_requests": len(requests),
        "oldest_requests": [_request(each, status, now_s) for each in islice(requests, MAX_LISTED)],
        "num_adapters": dict(Counter(each.tier.name.lower() for each in adapters)),
        "adapters": [_adapter(each) for each in used_most],
    }


def _session(session: GatewaySession) -> dict[str, Any]:
    return {
        "gateway_id": session.gateway_id,
        "num_requests": len(session.live),
        "num_unread": session.num_unread,
    }


def _request(request: ServerRequest, status: StatusBoard, now_s: float) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "gateway_id": request.session.gateway_id,
        "digests": request.digests,
        "stage": _stage(request, status),
        "age_s": round(now_s - request.arrival_s, 3),
        "num_prompt_tokens": request.num_prompt,
        "num_output_tokens": request.num_output,
        "last_token_age_s": request.last_token_s and round(now_s - request.last_token_s, 3),
    }


def _stage(request: ServerRequest, status: StatusBoard) -> str:
    """The reason why a request waits, or that it runs."""
    if request.num_output or request.has_entered:
        return "running"
    if request.grammar_check is not None and not request.grammar_check.done():
        return "checking its grammar"
    if any(status.adapter(digest).tier is not Tier.DEVICE for digest in request.digests):
        return "waiting for an adapter"
    return "waiting to be scheduled"


def _adapter(adapter: AdapterResidency) -> dict[str, Any]:
    return dataclasses.asdict(adapter) | {"tier": adapter.tier.name.lower()}
