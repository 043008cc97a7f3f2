"""The state of a gateway for /debug/state: ids, names, counts and times, without user text."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.rate_limit_store import RateLimitStore
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.pipeline.live import LiveRequest, LiveRequests
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.view import WorkerView

MAX_LISTED = 100
"""Most workers, tenants, requests and pauses that are listed; their numbers are always given."""


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayState:
    """The parts of a gateway that are looked at; made by `Gateway`."""

    not_ready_reason: Callable[[], str]
    fleet: Fleet
    registry: RegistryLink
    resolver: Resolver
    controller: AdmissionController
    live: LiveRequests
    rate_limits: RateLimitStore

    def read(self) -> dict[str, Any]:
        """The state now, as plain data for JSON."""
        views, live, paused = self.fleet.views(), self.live.all(), self.live.paused()
        oldest = heapq.nsmallest(MAX_LISTED, live, key=lambda each: each.prepared.arrival_s)
        return {
            "not_ready_reason": self.not_ready_reason(),
            "registry": {
                "is_watching": self.registry.is_watching,
                "num_adapters": self.resolver.snapshot.num_adapters,
            },
            "rate_limits": {
                "is_shared": self.rate_limits.is_shared,
                "num_gateways": self.rate_limits.num_gateways,
            },
            "admission": self._admission(),
            "num_workers": len(views),
            "workers": [_worker(view) for view in views[:MAX_LISTED]],
            "num_requests": len(live),
            "oldest_requests": [_request(each) for each in oldest],
            "num_paused": len(paused),
            "paused": [
                {"tenant": tenant, "adapter": name, "mode": mode}
                for (tenant, name), mode in list(paused.items())[:MAX_LISTED]
            ],
        }

    def _admission(self) -> dict[str, Any]:
        controller = self.controller
        counts = controller.queue.counts_by_tenant()
        busiest = heapq.nlargest(MAX_LISTED, counts, key=lambda tenant: sum(counts[tenant]))
        return {
            "num_running": controller.queue.num_running,
            "num_waiting": controller.queue.num_waiting,
            "expected_wait_s": round(controller.expected_wait_s, 3),
            "background_limit": controller.background_limit,
            "num_tenants": len(counts),
            "tenants": [
                {"tenant": tenant, "num_running": running, "num_waiting": waiting}
                for tenant, (running, waiting) in ((t, counts[t]) for t in busiest)
            ],
        }


def _worker(view: WorkerView) -> dict[str, Any]:
    return {
        "worker_id": view.worker_id,
        "address": view.address,
        "base": view.base_id,
        "epoch": view.epoch,
        "takes_requests": view.takes_requests,
        "is_connected": view.connected,
        "is_ready": view.ready,
        "is_draining": view.draining,
        "is_stale": view.stale,
        "in_flight": view.in_flight,
        "in_flight_tokens": view.in_flight_tokens,
        "load": dataclasses.asdict(view.load),
        "num_adapters": dict(Counter(r.tier.name.lower() for r in view.adapters.values())),
    }


def _request(live: LiveRequest) -> dict[str, Any]:
    prepared, age_s = live.prepared, now_s() - live.prepared.arrival_s
    return {
        "request_id": prepared.call.request_id,
        "tenant": prepared.call.tenant,
        "base": prepared.base.base_id,
        "adapters": [adapter.label for adapter in prepared.target.adapters],
        "num_choices": prepared.resolved.num_choices,
        "age_s": round(age_s, 3),
        "remaining_s": round(prepared.deadline_s - prepared.arrival_s - age_s, 3),
        "num_prompt_tokens": len(prepared.prompt_ids),
        "num_output_tokens": prepared.usage.completion_tokens,
        "workers": sorted(live.steering.addresses),
    }
