"""Flows of waiting requests, in heaps that stand from step to step.

Requests of one tenant and priority for one adapter set form a flow, flows of one tenant and
priority a group. Groups stand in a heap, and flows in one of their group, each by the key that it
had when it was looked at last. Keys only rise, and those of a tenant that is served rise together:
a walk looks at the groups whose old key comes before what it takes, and in these at the flows
whose own part of the key does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from services.worker.request import Request
from services.worker.scheduling.policies import Policy, QueueView, SortKey

GROUP_PARTS = 2
"""How many parts of a key all requests of a group have in common."""

Entry = tuple[float, int, Request]
"""Arrival, number: sorts a flow, and never compares requests."""


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one tenant and priority for one adapter set, the first to be served first."""

    group: Group
    entries: list[Entry] = field(default_factory=list)
    is_seen: bool = False
    """By the latest walk, which has taken it out of its group's heap."""


@dataclass(slots=True, eq=False)
class Group:
    """Flows of one tenant and priority."""

    num_flows: int = 0
    bounds: list[tuple[SortKey, int, Flow]] = field(default_factory=list)
    """A heap: no more than the own part of the key of a flow's first request, a number, the flow.
    Each flow is in it at least once, but for those that the latest walk saw. What is in it twice,
    or has ended, is dropped when it comes up."""
    is_seen: bool = False


class Bounds:
    """The heap of all groups that have flows, and what the latest walk has taken out of heaps."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, Group]] = []
        """No more than any key of a group."""
        self._count = 0
        self._num_flows = 0
        """In the groups' heaps."""
        self._seen_flows: list[Flow] = []
        self._seen_groups: list[Group] = []

    def __contains__(self, group: object) -> bool:
        return any(group is other for *_, other in self._heap)

    def is_crowded(self, num_flows: int) -> bool:
        """Whether most of what is kept belongs to flows that have ended."""
        return len(self._heap) + self._num_flows > 4 * num_flows + 64

    def add(self, flow: Flow) -> None:
        """The first request of a flow is new."""
        self._add(flow, ())
        self._count += 1
        heapq.heappush(self._heap, ((), self._count, flow.group))

    def look_back(self, policy: Policy, view: QueueView) -> None:
        """Put back what the latest walk took out, by its keys of now."""
        for flow in self._seen_flows:
            flow.is_seen = False
            if flow.entries:
                self._add(flow, policy.key(flow.entries[0][-1], view)[GROUP_PARTS:])
        for group in self._seen_groups:
            group.is_seen = False
            if (bound := self.bound_of(group, policy, view)) is not None:
                self._count += 1
                heapq.heappush(self._heap, (bound, self._count, group))
        self._seen_flows, self._seen_groups = [], []

    def next_group(self, key: SortKey | None) -> Group | None:
        """Take out a group that may have a key up to this one; None = any."""
        while self._heap and (key is None or self._heap[0][0] <= key):
            group = heapq.heappop(self._heap)[-1]
            if group.num_flows and not group.is_seen:
                group.is_seen = True
                self._seen_groups.append(group)
                return group
        return None

    def next_flow(self, group: Group) -> Flow | None:
        """Take out the flow on top of a group."""
        while group.bounds:
            self._num_flows -= 1
            flow = heapq.heappop(group.bounds)[-1]
            if flow.entries and not flow.is_seen:
                flow.is_seen = True
                self._seen_flows.append(flow)
                return flow
        return None

    def bound_of(self, group: Group, policy: Policy, view: QueueView) -> SortKey | None:
        """No more than any key of a flow in its heap; None = there is none."""
        for *_, flow in group.bounds:
            if flow.entries:  # whose key begins as all keys of the group do
                return (*policy.key(flow.entries[0][-1], view)[:GROUP_PARTS], *group.bounds[0][0])
        return None

    def _add(self, flow: Flow, own: SortKey) -> None:
        self._count += 1
        self._num_flows += 1
        heapq.heappush(flow.group.bounds, (own, self._count, flow))
