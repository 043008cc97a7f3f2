"""The waiting requests, so kept that a step costs what changed and not what waits.

Requests of one tenant for one adapter set form a flow: whatever makes the first of them wait, an
adapter that is not here above all, makes all of them wait. So a step looks at the first request
of a flow, and further only into those that it takes from. Flows stand in a heap from step to step,
each by the key that it had when it was looked at last; where keys only rise, a step looks at those
flows alone whose old key comes before what it takes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.worker.request import AdapterSet, Request
from services.worker.scheduling.policies import Policy, QueueView, SortKey

Entry = tuple[int, float, int, Request]
"""Priority, arrival, number: sorts a flow, and never compares requests."""


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one tenant for one adapter set, the first to be served first."""

    entries: list[Entry] = field(default_factory=list)
    is_seen: bool = False
    """By the latest walk, which has taken it out of the heap."""


Bound = tuple[SortKey, int, Flow]
"""No more than the key of the flow's first request; a number; the flow."""
Place = tuple[SortKey, int, int, Flow]
"""Key and number of a request, its index in its flow, and that flow."""


class WaitingQueue:
    """All waiting requests, by id and by flow."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._flows: dict[tuple[str, AdapterSet], Flow] = {}
        self._bounds: list[Bound] = []
        """A heap in which each flow stands at least once, but for those that the latest walk saw.
        What stands there twice, or is empty by now, is dropped when it comes up."""
        self._seen: list[Flow] = []
        """By the latest walk."""
        self._num_bounds = 0
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
        flows = [f for (_, adapters), f in self._flows.items() if digest in adapters.digests]
        return [entry[-1] for flow in flows for entry in flow.entries]

    def push(self, request: Request) -> None:
        """Queue a request; its place follows from its priority and arrival."""
        assert request.request_id not in self._entries, request.request_id
        self._num_pushed += 1
        entry = (request.priority, request.arrival_s, self._num_pushed, request)
        self._entries[request.request_id] = entry
        self._adapters.update(request.adapters.digests)
        self.num_tokens += request.num_tokens
        key = (request.tenant, request.adapters)
        flow = self._flows.setdefault(key, Flow())
        insort(flow.entries, entry)
        if flow.entries[0] is entry:
            self._bound(flow, ())

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
        flow = self._flows[request.tenant, request.adapters]
        del flow.entries[bisect_left(flow.entries, entry)]
        if not flow.entries:
            del self._flows[request.tenant, request.adapters]
        return request

    def walk(self, policy: Policy, view: QueueView) -> Walk:
        """The requests in the order of `policy`. Ends the walk before it.

        Keys of a policy may rise from walk to walk and within one, never fall, unless it says that
        they do (`keys_fall`): then all flows are looked at anew.
        """
        for flow in self._seen:
            flow.is_seen = False
            if flow.entries:
                self._bound(flow, policy(flow.entries[0][-1], view))
        self._seen = []
        if getattr(policy, "keys_fall", False) or len(self._bounds) > 2 * len(self._flows) + 16:
            self._bounds = []
            for flow in self._flows.values():
                self._bound(flow, policy(flow.entries[0][-1], view))
        return Walk(self._next_flow, policy, view)

    def _bound(self, flow: Flow, key: SortKey) -> None:
        self._num_bounds += 1
        heapq.heappush(self._bounds, (key, self._num_bounds, flow))

    def _next_flow(self, key: SortKey | None) -> Flow | None:
        """Take out a flow whose first request may come before, or along with, `key`; None = any."""
        while self._bounds and (key is None or self._bounds[0][0] <= key):
            flow = heapq.heappop(self._bounds)[-1]
            if flow.entries and not flow.is_seen:
                flow.is_seen = True
                self._seen.append(flow)
                return flow
        return None

    def check_integrity(self) -> None:
        """Assert that counters and flows agree with the requests."""
        in_flows = [entry for flow in self._flows.values() for entry in flow.entries]
        assert sorted(in_flows) == sorted(self._entries.values()), "flows and requests differ"
        assert self.num_tokens == sum(request.num_tokens for request in self)
        assert self._adapters == Counter(d for r in self for d in r.adapters.digests)
        assert all(flow.entries == sorted(flow.entries) for flow in self._flows.values())
        bounded = {id(flow) for *_, flow in self._bounds}
        assert all(f.is_seen or id(f) in bounded for f in self._flows.values()), "a flow is lost"


class Walk:
    """One pass over the queue. The request it stands at may be popped meanwhile."""

    def __init__(
        self,
        next_flow: Callable[[SortKey | None], Flow | None],
        policy: Policy,
        view: QueueView,
    ) -> None:
        """`next_flow`: the next whose first request may come before a key; None = no such flow."""
        self._next_flow = next_flow
        self._policy = policy
        self._view = view
        self._heap: list[Place] = []
        """Of the flows seen so far, where it stands in each."""
        self._last: tuple[Flow, int, Entry] | None = None

    def skip_flow(self) -> None:
        """Whatever holds up the current request holds up its whole flow."""
        self._last = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        self._advance()
        while True:
            while flow := self._next_flow(self._heap[0][0] if self._heap else None):
                heapq.heappush(self._heap, self._place(flow, 0))
            if not self._heap:
                raise StopIteration
            key, _, index, flow = heapq.heappop(self._heap)
            place = self._place(flow, index)
            if place[0] > key:
                heapq.heappush(self._heap, place)
                continue
            entry = flow.entries[index]
            self._last = (flow, index, entry)
            return entry[-1]

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
        return self._policy(request, self._view), number, index, flow
