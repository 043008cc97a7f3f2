"""The waiting requests, so kept that a step costs what changed and not what waits.

Requests of one tenant and priority for one adapter set form a flow: whatever makes the first of
them wait, an adapter that is not here above all, makes all of them wait. So a step looks at the
first request of a flow, and further only into those that it takes from. Flows stand in a heap of
their group, as the policy groups them, and groups in a heap of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from services.worker.request import AdapterSet, Request
from services.worker.scheduling.policies import FIRST_COME, Policy, QueueView, SortKey
from services.worker.scheduling.rising_heap import RisingHeap

Entry = tuple[float, int, Request]
"""Arrival, number: sorts a flow, and never compares requests."""
PASSED: SortKey = (math.inf,)
"""Key of a flow, or a group, that the latest walk has passed."""


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one tenant and priority for one adapter set, the first to be served first."""

    tenant: str
    priority: int
    adapters: AdapterSet
    group: Hashable
    """Its group's name."""
    entries: list[Entry] = field(default_factory=list)
    num_passed: int = 0
    """Of these, by the latest walk."""


class WaitingQueue:
    """All waiting requests, by id and by flow."""

    def __init__(self, policy: Policy = FIRST_COME) -> None:
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        self._flows: dict[tuple[str, int, AdapterSet], Flow] = {}
        self._by_digest: dict[str, dict[Flow, None]] = {}
        self._groups: dict[Hashable, RisingHeap[Flow]] = {}
        self._order: RisingHeap[RisingHeap[Flow]] = RisingHeap()
        self._in_use: Collection[str] = frozenset()
        """Digests of adapters, as the groups know them."""
        self._passed: list[Flow] = []
        """Flows of which the latest walk has passed a request."""
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
        return [entry[-1] for flow in self._by_digest.get(digest, ()) for entry in flow.entries]

    def push(self, request: Request) -> None:
        """Queue a request; its place follows from its priority and arrival."""
        assert request.request_id not in self._entries, request.request_id
        self._num_pushed += 1
        entry = (request.arrival_s, self._num_pushed, request)
        self._entries[request.request_id] = entry
        self.num_tokens += request.num_tokens
        key = (request.tenant, request.priority, request.adapters)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(*key, group=None)
            for digest in request.adapters.digests:
                self._by_digest.setdefault(digest, {})[flow] = None
        insort(flow.entries, entry)
        if flow.entries[0] is entry:
            self._enter(flow)

    def pop(self, request_id: str) -> Request | None:
        """Take a request out; None when it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        request = entry[-1]
        self.num_tokens -= request.num_tokens
        key = (request.tenant, request.priority, request.adapters)
        flow = self._flows[key]
        del flow.entries[bisect_left(flow.entries, entry)]
        if not flow.entries:
            del self._flows[key]
            self._leave_group(flow)
            for digest in request.adapters.digests:
                del self._by_digest[digest][flow]
                if not self._by_digest[digest]:
                    del self._by_digest[digest]
        return request

    def walk(self, view: QueueView) -> Walk:
        """The requests in the policy's order. Ends the walk before it."""
        for flow in self._passed:
            flow.num_passed = 0
            if flow.entries:
                self._enter(flow)
        self._passed = []
        if self._policy.clusters:
            changed = frozenset(view.in_use).symmetric_difference(self._in_use)
            self._in_use = view.in_use
            for flow in {f: None for digest in changed for f in self._by_digest.get(digest, ())}:
                self._leave_group(flow)
                self._enter(flow)
            for group in self._groups.values():
                self._order.push(group)
        return Walk(self._order, self._policy, view, self._passed)

    def check_integrity(self) -> None:
        """Assert that counters and flows agree with the requests."""
        flows = self._flows.values()
        in_flows = [entry for flow in flows for entry in flow.entries]
        assert sorted(in_flows) == sorted(self._entries.values()), "flows and requests differ"
        assert self.num_tokens == sum(request.num_tokens for request in self)
        by_digest = Counter((d, f) for d, of_digest in self._by_digest.items() for f in of_digest)
        assert by_digest == Counter((d, f) for f in flows for d in f.adapters.digests)
        assert all(flow.entries == sorted(flow.entries) for flow in flows)
        assert all(flow in self._groups[flow.group] for flow in flows), "flow lost"
        assert all(group in self._order for group in self._groups.values()), "group lost"
        assert len(self._order) == len(self._groups)
        sizes = {name: len(group) for name, group in self._groups.items()}
        assert sizes == Counter(flow.group for flow in flows)

    def _enter(self, flow: Flow) -> None:
        """Stand in the heaps, by a key that may have fallen."""
        clusters = self._policy.clusters
        flow.group = flow.priority, flow.adapters.within(self._in_use) if clusters else flow.tenant
        group = self._groups.setdefault(flow.group, RisingHeap())
        group.push(flow)
        self._order.push(group)

    def _leave_group(self, flow: Flow) -> None:
        group = self._groups[flow.group]
        group.discard(flow)
        if not group:
            del self._groups[flow.group]
            self._order.discard(group)


class Walk:
    """One pass over the queue. The request it stands at may be popped meanwhile."""

    def __init__(
        self,
        order: RisingHeap[RisingHeap[Flow]],
        policy: Policy,
        view: QueueView,
        passed: list[Flow],
    ) -> None:
        self._order = order
        self._policy = policy
        self._view = view
        self._passed = passed
        self._last: tuple[Flow, Entry] | None = None

    def skip_flow(self) -> None:
        """Whatever holds up the current request holds up its whole flow."""
        if self._last is not None:
            flow, _ = self._last
            flow.num_passed = len(flow.entries)
            self._passed.append(flow)
            self._last = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        self._advance()
        found = self._order.first(self._group_key)
        if found is None or found[0] is PASSED:
            raise StopIteration
        first = found[1].first(self._own_key)
        assert first is not None, "a group without flows"
        flow = first[1]
        entry = flow.entries[flow.num_passed]
        self._last = flow, entry
        return entry[-1]

    def _advance(self) -> None:
        """Pass the last request, if it is still there."""
        if self._last is not None:
            flow, entry = self._last
            if flow.num_passed < len(flow.entries) and flow.entries[flow.num_passed] is entry:
                flow.num_passed += 1
                self._passed.append(flow)

    def _group_key(self, group: RisingHeap[Flow]) -> SortKey:
        first = group.first(self._own_key)
        if first is None or first[0] is PASSED:
            return PASSED
        own_key, flow = first
        request = flow.entries[flow.num_passed][-1]
        return (*self._policy.group_key(request, self._view), *own_key)

    def _own_key(self, flow: Flow) -> SortKey:
        """By the policy, then by who was pushed first."""
        if flow.num_passed >= len(flow.entries):
            return PASSED
        _, number, request = flow.entries[flow.num_passed]
        return (*self._policy.own_key(request, self._view), number)
