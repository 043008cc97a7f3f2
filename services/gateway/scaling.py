"""The gauges that autoscalers read; present for a base even when it has no worker."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.metrics import ESTIMATED_WAIT_S, QUEUED_TOKENS, READY_WORKERS
from services.gateway.routing import Placement, first_token_s
from services.gateway.view import WorkerView


def publish_scaling(base_ids: Iterable[str], views: list[WorkerView], gate_wait_s: float) -> None:
    """Set the scaling gauges; a base without workers stays present."""
    for base_id in base_ids:
        mine = [view for view in views if view.base_id == base_id]
        ready = [view for view in mine if view.takes_requests]
        fresh = Placement(key="", digests=(), num_prompt_tokens=0, homes=0)
        soonest_s = min((first_token_s(view, fresh) for view in ready), default=0.0)
        READY_WORKERS.labels(base_id).set(len(ready))
        QUEUED_TOKENS.labels(base_id).set(sum(view.load.queued_tokens for view in mine))
        ESTIMATED_WAIT_S.labels(base_id).set(gate_wait_s + soonest_s)
