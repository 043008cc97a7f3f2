"""The waiting requests of one tenant: by priority, then by the service of their adapters, then by
arrival.

Of requests that are as urgent, those for the adapters that were served least go first. Requests for
a popular adapter therefore do not delay the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from loraplex_services.common.virtual_counters import VirtualCounters
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.admission.rising_heap import RisingHeap, SortKey

Requests = OrderedDict[int, AdmissionRequest]
"""Requests by number, oldest first. A client that leaves may remove a thousand from the middle."""
Flow = tuple[bool, Hashable]
"""Whether its requests await a fetch, and their adapters."""


class TenantQueue:
    """Requests of one tenant, and the service that its adapters have received."""

    def __init__(self) -> None:
        self.served = VirtualCounters()
        """Service by the adapters of the tenant's live requests."""
        self._of_priority: dict[int, _EquallyUrgent] = {}
        """No empty ones."""
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def least_urgent(self) -> int:
        """The least urgent priority of waiting requests."""
        return max(self._of_priority)

    def first(self, *, but_awaiting_fetch: bool = False) -> AdmissionRequest | None:
        """The request that starts next. `but_awaiting_fetch`: of those whose adapters a worker
        has."""
        for priority in sorted(self._of_priority):
            found = self._of_priority[priority].first(self.served, but_awaiting_fetch)
            if found is not None:
                return found
        return None

    def precedes(self, waiting: AdmissionRequest, new: AdmissionRequest) -> bool:
        """Whether a waiting request goes before one that comes now."""
        if waiting.priority != new.priority:
            return waiting.priority < new.priority
        served = self.served.present[waiting.adapters].served
        return served <= self.served.served_of(new.adapters)

    def newest(self) -> AdmissionRequest:
        """The newest of the least urgent requests."""
        requests = self._of_priority[max(self._of_priority)].requests
        return requests[next(reversed(requests))]

    def push(self, request: AdmissionRequest) -> None:
        """Queue a live request."""
        self._of_priority.setdefault(request.priority, _EquallyUrgent()).push(request)
        self._num += 1

    def remove(self, request: AdmissionRequest) -> None:
        """Remove a waiting request."""
        urgent = self._of_priority[request.priority]
        urgent.remove(request)
        if not urgent.requests:
            del self._of_priority[request.priority]
        self._num -= 1


class _EquallyUrgent:
    """Requests of one priority. A look at the first does not depend on how many there are."""

    def __init__(self) -> None:
        self.requests: Requests = OrderedDict()
        self._flows: dict[Flow, Requests] = {}
        """No empty ones."""
        self._orders: tuple[RisingHeap[Flow], RisingHeap[Flow]] = RisingHeap(), RisingHeap()
        """The flows whose adapters a worker has, and the others."""

    def push(self, request: AdmissionRequest) -> None:
        self.requests[request.number] = request
        flow = request.awaits_fetch, request.adapters
        if flow not in self._flows:
            self._flows[flow] = OrderedDict()
            self._orders[request.awaits_fetch].push(flow)
        self._flows[flow][request.number] = request

    def remove(self, request: AdmissionRequest) -> None:
        del self.requests[request.number]
        flow = request.awaits_fetch, request.adapters
        del self._flows[flow][request.number]
        if not self._flows[flow]:
            del self._flows[flow]
            self._orders[request.awaits_fetch].discard(flow)

    def first(self, served: VirtualCounters, but_awaiting_fetch: bool) -> AdmissionRequest | None:
        def key_of(flow: Flow) -> SortKey:
            _, adapters = flow
            return served.present[adapters].served, next(iter(self._flows[flow]))

        orders = self._orders[:1] if but_awaiting_fetch else self._orders
        flows = [flow for order in orders if (flow := order.first(key_of)) is not None]
        if not flows:
            return None
        return next(iter(self._flows[min(flows, key=key_of)].values()))
