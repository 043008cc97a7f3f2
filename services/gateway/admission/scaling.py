"""Gauges for autoscalers and operators, computed when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.routing.router import RoutingRequest, first_token_s
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.view import WorkerView

_PREFIX = "loraplex_gateway_"
_FRESH = RoutingRequest(key="", digests=(), num_prompt_tokens=0, num_replicas=0)


class ScalingSignals(Collector):
    """Reads the fleet and the admission queue."""

    def __init__(self, fleet: Fleet, controller: AdmissionController) -> None:
        self._fleet = fleet
        self._controller = controller

    def register(self) -> None:
        """Make the gauges visible."""
        REGISTRY.register(self)

    def unregister(self) -> None:
        """Remove the gauges."""
        REGISTRY.unregister(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Claims no names, because a test process may contain several gateways."""
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The requests of this gateway, and one sample for each base that was ever seen, even if it
        has no worker now."""
        ready = _by_base("ready_workers", "Workers that take requests.")
        queued = _by_base("queued_tokens", "Prompt tokens not yet computed at workers.")
        wait = _by_base("estimated_wait_seconds", "Expected wait of a new request.")
        for base_id in self._fleet.bases():
            views = self._fleet.views(base_id)
            taking = [view for view in views if view.takes_requests]
            ready.add_metric([base_id], len(taking))
            # The tokens that a lost worker reported last do not wait there any more.
            reported = [view.load.queued_tokens for view in views if view.connected]
            queued.add_metric([base_id], sum(reported))
            wait.add_metric([base_id], self._controller.expected_wait_s + _soonest_s(taking))
        return ready, queued, wait, *self._requests()

    def _requests(self) -> Iterable[GaugeMetricFamily]:
        running, waiting = self._controller.queue.num_running, self._controller.queue.num_waiting
        yield GaugeMetricFamily(f"{_PREFIX}running_requests", "Requests past admission.", running)
        yield GaugeMetricFamily(
            f"{_PREFIX}waiting_requests", "Requests waiting for admission.", waiting
        )


def _soonest_s(views: Iterable[WorkerView]) -> float:
    return min((first_token_s(view, _FRESH) for view in views), default=0.0)


def _by_base(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["base"])
