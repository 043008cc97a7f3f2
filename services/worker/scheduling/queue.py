"""The waiting queue. The cost of a step depends on what has changed, not on the number of requests.

Requests of one tenant and priority for one adapter set form a flow. What makes the first of them
wait, such as a missing adapter, makes all of them wait. A step therefore looks only at the first
request of a flow, and at further ones only after it has started the first.

The policy assigns flows to groups. Each group has a heap of its flows, and the groups are in two
heaps: one for flows whose adapters are on the device and one for flows that wait for a copy, which
can be skipped when no more copies may begin. A flow whose adapters are not on disk is in no heap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from loraplex.api.request import AdapterSet
from loraplex.api.residency import Tier
from loraplex_services.worker.scheduling.policies import FIRST_COME, Policy, QueueView, SortKey
from loraplex_services.worker.scheduling.rising_heap import LAST, RisingHeap
from loraplex_services.worker.types.request import Request

Entry = tuple[float, int, Request]
"""Arrival, number: sorts a flow, and never compares requests."""
GroupName = tuple[bool, str, bool]
"""Whether all adapters are on the device; the tenant; and whether all adapters are in use, if the
policy asks for it."""
Groups = RisingHeap[RisingHeap["Flow"]]
AdapterState = tuple[Tier, bool]
"""State of an adapter: its tier, and whether a running request uses it."""


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one tenant and priority for one adapter set, the first to be served first."""

    tenant: str
    priority: int
    adapters: AdapterSet
    group: GroupName | None = None
    """Name of its group; None = the flow is in no group."""
    entries: list[Entry] = field(default_factory=list)
    num_passed: int = 0
    """Those of `requests` that the latest walk has passed."""


@dataclass(slots=True, eq=False)
class Awaited:
    """An adapter that waiting requests use."""

    where: AdapterState
    """State of the adapter by which its flows are grouped."""
    flows: dict[Flow, None] = field(default_factory=dict)


class WaitingQueue:
    """All waiting requests, by id and by flow."""

    def __init__(self, where: Callable[[str], AdapterState], policy: Policy = FIRST_COME) -> None:
        """`where(digest)`: the tier of an adapter, and whether a running request uses it."""
        self._where = where
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        self._flows: dict[tuple[str, int, AdapterSet], Flow] = {}
        self._awaited: dict[str, Awaited] = {}
        """Awaited adapters by digest."""
        self._groups: dict[GroupName, RisingHeap[Flow]] = {}
        num_rising = policy.num_tenant_parts if policy.clusters else None
        self._ready: Groups = RisingHeap(num_rising)
        self._absent: Groups = RisingHeap(num_rising)
        self._passed: list[Flow] = []
        """Flows in which the latest walk has skipped a request."""
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
        awaited = self._awaited.get(digest)
        return [entry[-1] for flow in awaited.flows for entry in flow.entries] if awaited else []

    def push(self, request: Request) -> None:
        """Queue a request; its position follows from its priority and arrival."""
        assert request.request_id not in self._entries, request.request_id
        self._num_pushed += 1
        entry = (request.arrival_s, self._num_pushed, request)
        self._entries[request.request_id] = entry
        self.num_tokens += request.num_tokens
        key = (request.tenant, request.priority, request.adapters)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(*key)
            for digest in request.adapters.digests:
                if digest not in self._awaited:
                    self._awaited[digest] = Awaited(self._look(digest))
                self._awaited[digest].flows[flow] = None
        insort(flow.entries, entry)
        if flow.entries[0] is entry:
            self._enter(flow)

    def pop(self, request_id: str) -> Request | None:
        """Remove a request; None if it does not wait."""
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
                del self._awaited[digest].flows[flow]
                if not self._awaited[digest].flows:
                    del self._awaited[digest]
        return request

    def walk(self, view: QueueView, moved: Collection[str]) -> Walk:
        """Walk through the requests in the policy's order. A new walk ends the one before it.

        Args:
            moved: digests of adapters that may be elsewhere than at the last walk.
        """
        for flow in self._passed:
            flow.num_passed = 0
            if flow.entries:
                self._enter(flow)
        self._passed = []
        for digest in moved:
            self._look_again(digest)
        return Walk(self._ready, self._absent, self._policy, view, self._passed)

    def check_integrity(self) -> None:
        """Assert that counters and flows agree with the requests."""
        flows = self._flows.values()
        in_flows = [entry for flow in flows for entry in flow.entries]
        assert sorted(in_flows) == sorted(self._entries.values()), "flows and requests differ"
        assert self.num_tokens == sum(request.num_tokens for request in self)
        awaited = Counter((d, f) for d, adapter in self._awaited.items() for f in adapter.flows)
        assert awaited == Counter((d, f) for f in flows for d in f.adapters.digests)
        assert all(flow.entries == sorted(flow.entries) for flow in flows)
        standing = [(name, flow) for flow in flows if (name := flow.group) is not None]
        assert all(flow in self._groups[name] for name, flow in standing), "flow lost"
        assert all(group in self._order_of(name) for name, group in self._groups.items()), "lost"
        assert len(self._ready) + len(self._absent) == len(self._groups)
        sizes = {name: len(group) for name, group in self._groups.items()}
        assert sizes == Counter(name for name, _ in standing)

    def _look(self, digest: str) -> AdapterState:
        """The part of an adapter's state that decides the groups of its flows."""
        tier, in_use = self._where(digest)
        return Tier.DISK if tier == Tier.LOADING else tier, in_use and self._policy.clusters

    def _look_again(self, digest: str) -> None:
        """Move the flows of an adapter to the groups to which they belong now."""
        awaited = self._awaited.get(digest)
        if awaited is None or (where := self._look(digest)) == awaited.where:
            return
        awaited.where = where
        for flow in awaited.flows:
            self._leave_group(flow)
            self._enter(flow)

    def _enter(self, flow: Flow) -> None:
        """Enter a flow into the heaps again, with a key that may have fallen."""
        adapters = [self._awaited[digest].where for digest in flow.adapters.digests]
        tier = min((tier for tier, _ in adapters), default=Tier.DEVICE)
        if tier == Tier.NONE:
            return
        is_in_use = self._policy.clusters and all(in_use for _, in_use in adapters)
        tenant = flow.tenant if self._policy.num_tenant_parts else ""
        flow.group = (tier == Tier.DEVICE, tenant, is_in_use)
        group = self._groups.setdefault(flow.group, RisingHeap())
        group.push(flow)
        self._order_of(flow.group).push(group)

    def _leave_group(self, flow: Flow) -> None:
        if flow.group is None:
            return
        group = self._groups[flow.group]
        group.discard(flow)
        if not group:
            del self._groups[flow.group]
            self._order_of(flow.group).discard(group)
        flow.group = None

    def _order_of(self, name: GroupName) -> Groups:
        is_ready, *_ = name
        return self._ready if is_ready else self._absent


class Walk:
    """One pass over the queue. The request it stands at may be popped in the meantime."""

    def __init__(
        self, ready: Groups, absent: Groups, policy: Policy, view: QueueView, passed: list[Flow]
    ) -> None:
        self._ready = ready
        self._absent = absent
        self._policy = policy
        self._view = view
        self._passed = passed
        self._last: tuple[Flow, Entry] | None = None
        self.takes_absent = True
        """Whether the walk still visits requests whose adapters are not on the device."""
        self.takes_ready = True
        """Whether the walk still visits requests whose adapters are on the device."""

    def skip_flow(self) -> None:
        """Skip the rest of the current request's flow: what keeps this request waiting keeps all of
        them waiting."""
        if self._last is not None:
            flow, _ = self._last
            flow.num_passed = len(flow.entries)
            self._passed.append(flow)
            self._last = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        self._advance()
        sides = ((self._ready, self.takes_ready), (self._absent, self.takes_absent))
        firsts = (order.first(self._group_key) for order, is_taken in sides if is_taken)
        key, group = min(firsts, key=itemgetter(0), default=(LAST, None))
        if group is None or key is LAST:
            raise StopIteration
        _, flow = group.first(self._own_key)
        assert flow is not None, "an empty group"
        entry = flow.entries[flow.num_passed]
        self._last = flow, entry
        return entry[-1]

    def _advance(self) -> None:
        """Move beyond the last request, if it is still in the queue."""
        if self._last is not None:
            flow, entry = self._last
            if flow.num_passed < len(flow.entries) and flow.entries[flow.num_passed] is entry:
                flow.num_passed += 1
                self._passed.append(flow)

    def _group_key(self, group: RisingHeap[Flow]) -> SortKey:
        own_key, flow = group.first(self._own_key)
        if flow is None or own_key is LAST:
            return LAST
        request = flow.entries[flow.num_passed][-1]
        return (*self._policy.group_key(request, self._view), *own_key)

    def _own_key(self, flow: Flow) -> SortKey:
        """Sort key: the policy's, then the order of arrival in the queue."""
        if flow.num_passed >= len(flow.entries):
            return LAST
        _, number, request = flow.entries[flow.num_passed]
        return (*self._policy.own_key(request, self._view), number)
