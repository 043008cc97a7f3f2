"""The waiting requests, so kept that a step costs what changed and not what waits.

Requests of one tenant and priority for one adapter set form a flow: whatever makes the first of
them wait, an adapter that is not here above all, makes all of them wait. So a step looks at the
first request of a flow, and further only into those that it takes from; `flows.py` says which.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

from services.worker.request import AdapterSet, Request
from services.worker.scheduling.flows import Bounds, Entry, Flow, Group
from services.worker.scheduling.policies import Policy, QueueView, SortKey

Place = tuple[SortKey, int, int, Flow | Group]
"""In a walk: key and number of a request, its index in its flow, and that flow; or what no key of
the flows left in a group is below, and that group."""


class WaitingQueue:
    """All waiting requests, by id and by flow."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._flows: dict[tuple[str, int, AdapterSet], Flow] = {}
        self._groups: dict[tuple[str, int], Group] = {}
        self._bounds = Bounds()
        self._adapters: Counter[str] = Counter()
        self._num_pushed = 0
        self.num_tokens = 0
        """Known tokens of all requests; none of them is computed."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (entry[-1] for entry in self._entries.values())

    def get(self, request_id: str) -> Request | None:
        """The request of this id, if it waits."""
        entry = self._entries.get(request_id)
        return entry and entry[-1]

    def needing(self, digest: str) -> list[Request]:
        """Requests that use this adapter."""
        if digest not in self._adapters:
            return []
        flows = [f for (*_, adapters), f in self._flows.items() if digest in adapters.digests]
        return [entry[-1] for flow in flows for entry in flow.entries]

    def push(self, request: Request) -> None:
        """Queue a request; its place follows from its priority and arrival."""
        assert request.request_id not in self._entries, request.request_id
        self._num_pushed += 1
        entry = (request.arrival_s, self._num_pushed, request)
        self._entries[request.request_id] = entry
        self._adapters.update(request.adapters.digests)
        self.num_tokens += request.num_tokens
        key = (request.tenant, request.priority, request.adapters)
        if (flow := self._flows.get(key)) is None:
            group = self._groups.setdefault(key[:2], Group())
            group.num_flows += 1
            flow = self._flows[key] = Flow(group)
        insort(flow.entries, entry)
        if flow.entries[0] is entry:
            self._bounds.add(flow)

    def pop(self, request_id: str) -> Request | None:
        """Take a request out; None when it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        request = entry[-1]
        self._adapters.subtract(request.adapters.digests)
        for digest in request.adapters.digests:
            if not self._adapters[digest]:
                del self._adapters[digest]
        self.num_tokens -= request.num_tokens
        key = (request.tenant, request.priority, request.adapters)
        flow = self._flows[key]
        del flow.entries[bisect_left(flow.entries, entry)]
        if not flow.entries:
            del self._flows[key]
            flow.group.num_flows -= 1
            if not flow.group.num_flows:
                del self._groups[key[:2]]
        return request

    def walk(self, policy: Policy, view: QueueView) -> Walk:
        """The requests in the order of `policy`. Ends the walk before it."""
        self._bounds.look_back(policy, view)
        if self._bounds.is_crowded(len(self._flows)):
            self._bounds = Bounds()
            for group in self._groups.values():
                group.bounds.clear()
            for flow in self._flows.values():
                self._bounds.add(flow)
        if policy.keys_fall:
            return Walk(Bounds(), policy, view, self._flows.values())
        return Walk(self._bounds, policy, view)

    def check_integrity(self) -> None:
        """Assert that counters and flows agree with the requests."""
        in_flows = [entry for flow in self._flows.values() for entry in flow.entries]
        assert sorted(in_flows) == sorted(self._entries.values()), "flows and requests differ"
        assert self.num_tokens == sum(request.num_tokens for request in self)
        assert self._adapters == Counter(d for r in self for d in r.adapters.digests)
        assert all(flow.entries == sorted(flow.entries) for flow in self._flows.values())
        for flow in self._flows.values():
            group = flow.group
            assert flow.is_seen or any(flow is other for *_, other in group.bounds), "flow lost"
            assert group.is_seen or group in self._bounds, "group lost"
        flows = Counter(key[:2] for key in self._flows)
        assert flows == {key: group.num_flows for key, group in self._groups.items()}


class Walk:
    """One pass over the queue. The request it stands at may be popped meanwhile."""

    def __init__(
        self, bounds: Bounds, policy: Policy, view: QueueView, flows: Collection[Flow] = ()
    ) -> None:
        """`flows`: those to look at anyway."""
        self._bounds = bounds
        self._policy = policy
        self._view = view
        self._heap: list[Place] = [self._place(flow, 0) for flow in flows]
        heapq.heapify(self._heap)
        self._num_groups = 0
        self._last: tuple[Flow, int, Entry] | None = None

    def skip_flow(self) -> None:
        """Whatever holds up the current request holds up its whole flow."""
        self._last = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        self._advance()
        while True:
            while group := self._bounds.next_group(self._heap[0][0] if self._heap else None):
                self._line_up(group)
            if not self._heap:
                raise StopIteration
            key, _, index, stop = heapq.heappop(self._heap)
            if isinstance(stop, Group):
                if (flow := self._bounds.next_flow(stop)) is not None:
                    heapq.heappush(self._heap, self._place(flow, 0))
                    self._line_up(stop)
                continue
            place = self._place(stop, index)
            if place[0] > key:
                heapq.heappush(self._heap, place)
                continue
            entry = stop.entries[index]
            self._last = (stop, index, entry)
            return entry[-1]

    def _line_up(self, group: Group) -> None:
        """What is left of a group; before all requests that have the same key."""
        if (bound := self._bounds.bound_of(group, self._policy, self._view)) is not None:
            self._num_groups += 1
            heapq.heappush(self._heap, (bound, -1, self._num_groups, group))

    def _advance(self) -> None:
        """Line up the next request of the flow that the last one came from."""
        if self._last is None:
            return
        (flow, index, entry), self._last = self._last, None
        was_taken = index >= len(flow.entries) or flow.entries[index] is not entry
        index += not was_taken
        if index < len(flow.entries):
            heapq.heappush(self._heap, self._place(flow, index))

    def _place(self, flow: Flow, index: int) -> Place:
        """Sorts by the policy's key, then by who was pushed first."""
        *_, number, request = flow.entries[index]
        return self._policy.key(request, self._view), number, index, flow
