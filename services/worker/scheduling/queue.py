"""The waiting queue of a worker: requests that gateways have sent and that no step has begun.

It is short, because gateways keep the long queue and send what the next steps can start. The
requests of the tenant that this worker has served least go first, by priority and then by arrival.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loraplex.api.request import AdapterSet
from loraplex.api.residency import Tier
from loraplex_services.worker.types.request import Request

Entry = tuple[int, float, int, Request]
"""Priority, arrival, number: sorts the requests of a tenant, and never compares requests."""


class WaitingQueue:
    """All waiting requests, by id and by tenant."""

    def __init__(self, tier_of: Callable[[str], Tier], served_of: Callable[[str], float]) -> None:
        """
        Args:
            tier_of: the tier of an adapter.
            served_of: the service that a tenant has received here.
        """
        self._tier_of = tier_of
        self._served_of = served_of
        self._entries: dict[str, Entry] = {}
        self._of_tenant: dict[str, list[Entry]] = {}
        """Entries of each tenant, in order and not empty."""
        self._num_pushed = 0
        self.num_tokens = 0
        """Known tokens of all waiting requests; none of them is computed."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (entry[-1] for entry in self._entries.values())

    def get(self, request_id: str) -> Request | None:
        """The request with this id, if it waits."""
        entry = self._entries.get(request_id)
        return entry and entry[-1]

    def needing(self, digest: str) -> list[Request]:
        """Requests that use this adapter."""
        return [request for request in self if digest in request.adapters.digests]

    def push(self, request: Request) -> None:
        """Queue a request; its position follows from its priority and arrival."""
        assert request.request_id not in self._entries, request.request_id
        self._num_pushed += 1
        entry = (request.priority, request.arrival_s, self._num_pushed, request)
        self._entries[request.request_id] = entry
        insort(self._of_tenant.setdefault(request.tenant, []), entry)
        self.num_tokens += request.num_tokens

    def pop(self, request_id: str) -> Request | None:
        """Remove a request; None if it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        request = entry[-1]
        entries = self._of_tenant[request.tenant]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._of_tenant[request.tenant]
        self.num_tokens -= request.num_tokens
        return request

    def walk(self, cluster: Cluster | None = None) -> Walk:
        """Walk through the requests in order.

        Args:
            cluster: whose requests go first among those of a tenant, if any.
        """
        return Walk(self._of_tenant, self._tier_of, self._served_of, cluster)

    def check_integrity(self) -> None:
        """Assert that counters and tenants agree with the requests."""
        of_tenants = [entry for entries in self._of_tenant.values() for entry in entries]
        assert sorted(of_tenants) == sorted(self._entries.values()), "tenants and requests differ"
        assert all(entries == sorted(entries) for entries in self._of_tenant.values())
        assert self.num_tokens == sum(request.num_tokens for request in self)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The adapters that run; while enough of them do, requests for them go first."""

    in_use: frozenset[str]
    since_s: float
    """A request that arrived before this is not passed over."""


class _Lane:
    """The requests of one tenant that a walk has not visited."""

    def __init__(self, tenant: str, waiting: list[Entry]) -> None:
        self.tenant = tenant
        self._waiting = waiting
        self._entries: list[Entry] | None = None
        self.skipped: set[AdapterSet] = set()

    @property
    def entries(self) -> list[Entry]:
        """Entries that were not visited, in reverse order. They are copied at the first access."""
        if self._entries is None:
            self._entries = self._waiting[::-1]
        return self._entries


class Walk:
    """One pass over the queue. The request it stands at may be popped in the meantime."""

    def __init__(
        self,
        of_tenant: dict[str, list[Entry]],
        tier_of: Callable[[str], Tier],
        served_of: Callable[[str], float],
        cluster: Cluster | None,
    ) -> None:
        self._tier_of = tier_of
        self._served_of = served_of
        self._cluster = cluster
        self._last: tuple[_Lane, AdapterSet] | None = None
        self._lanes = [
            (served_of(tenant), -math.inf, number, _Lane(tenant, entries))
            for number, (tenant, entries) in enumerate(of_tenant.items())
        ]
        """A heap by service of the tenant and arrival of its next request, or less than that."""
        heapq.heapify(self._lanes)
        self.takes_absent = True
        """Whether the walk still visits requests whose adapters are not on the device."""
        self.takes_ready = True
        """Whether the walk still visits requests whose adapters are on the device."""

    def skip_flow(self) -> None:
        """Skip the other requests of the same tenant for the same adapters: what keeps this one
        waiting keeps all of them waiting."""
        if self._last is not None:
            lane, adapters = self._last
            lane.skipped.add(adapters)

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        while self._lanes:
            served, arrival_s, number, lane = self._lanes[0]
            index = self._next_of(lane)
            if index is None:
                heapq.heappop(self._lanes)
                continue
            _, own_arrival_s, _, request = lane.entries[index]
            key = self._served_of(lane.tenant), own_arrival_s
            if key != (served, arrival_s):
                heapq.heapreplace(self._lanes, (*key, number, lane))
            if self._lanes[0][-1] is lane:
                del lane.entries[index]
                self._last = lane, request.adapters
                return request
        raise StopIteration

    def _next_of(self, lane: _Lane) -> int | None:
        """Index of the entry of a lane that is visited next, if any is left."""
        entries = lane.entries
        while entries and not self._takes(lane, entries[-1][-1]):
            entries.pop()
        if not entries:
            return None
        first, cluster = len(entries) - 1, self._cluster
        priority, arrival_s, _, _ = entries[first]
        if cluster is None or arrival_s <= cluster.since_s:
            return first
        for index in range(first, -1, -1):
            request = entries[index][-1]
            if request.priority != priority:
                break
            if request.adapters.within(cluster.in_use) and self._takes(lane, request):
                return index
        return first

    def _takes(self, lane: _Lane, request: Request) -> bool:
        if request.adapters in lane.skipped:
            return False
        tier = min(map(self._tier_of, request.adapters.digests), default=Tier.DEVICE)
        return self.takes_ready if tier == Tier.DEVICE else tier > Tier.NONE and self.takes_absent
