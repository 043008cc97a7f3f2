"""The queue against a plain sorted list."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.api.request import AdapterSet
from loraplex.api.residency import Tier
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.scheduling.queue import Cluster, WaitingQueue
from loraplex_services.worker.scheduling.running import running_order
from loraplex_services.worker.types.request import Request


def make_request(name: str, *digests: str, **fields: object) -> Request:
    adapters = AdapterSet(tuple((digest, 1.0) for digest in digests))
    return Request(name, [1, 2], SamplingParams(4, 0), adapters, **fields)


def make_queue(served: Counter[str] | None = None) -> WaitingQueue:
    served = Counter() if served is None else served
    return WaitingQueue(lambda digest: Tier.DEVICE, served.__getitem__)


def names(queue: WaitingQueue, cluster: Cluster | None = None) -> list[str]:
    return [request.request_id for request in queue.walk(cluster)]


class QueueMachine(RuleBasedStateMachine):
    """Pushes, pops and walks, taking some requests on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Counter({"t": 0, "u": 1})
        """Odd for one tenant and even for the other, so never equal."""
        self.tiers = dict.fromkeys("abc", Tier.DEVICE)
        self.queue = WaitingQueue(self.tiers.__getitem__, self.served.__getitem__)
        self.model: dict[str, Request] = {}
        self.count = 0

    def tier(self, request: Request) -> Tier:
        tiers = (self.tiers[digest] for digest in request.adapters.digests)
        return min(tiers, default=Tier.DEVICE)

    def in_order(self) -> list[Request]:
        requests = (r for r in self.model.values() if self.tier(r) > Tier.NONE)
        return sorted(
            requests,
            key=lambda r: (self.served[r.tenant], r.priority, r.arrival_s, int(r.request_id)),
        )

    @rule(
        digests=st.sets(st.sampled_from("abc"), max_size=2),
        tenant=st.sampled_from("tu"),
        priority=st.integers(0, 1),
        delay_s=st.sampled_from([0.0, 1.0]),
    )
    def push(self, digests: set[str], tenant: str, priority: int, delay_s: float) -> None:
        self.count += 1
        request = make_request(
            f"{self.count}",
            *sorted(digests),
            tenant=tenant,
            priority=priority,
            arrival_s=self.count // 4 + delay_s,
        )
        self.model[request.request_id] = request
        self.queue.push(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model)))
        assert self.queue.pop(request_id) is self.model.pop(request_id)
        assert self.queue.pop(request_id) is None

    @rule(tenant=st.sampled_from("tu"), cost=st.integers(1, 5))
    def charge(self, tenant: str, cost: int) -> None:
        self.served[tenant] += 2 * cost

    @rule(
        taken=st.sets(st.integers(0, 20)), num_seen=st.integers(1, 30), num_any=st.integers(0, 40)
    )
    def walk(self, taken: set[int], num_seen: int, num_any: int) -> None:
        """The order is seen, whatever is taken on the way and wherever the walk ends, and from some
        place on without those whose adapters are not on the device."""
        expected = self.in_order()
        ready = [request for request in expected[num_any:] if self.tier(request) == Tier.DEVICE]
        expected[num_any:] = ready
        walk, seen = self.queue.walk(), []
        walk.takes_absent = num_any > 0
        for index, request in enumerate(walk):
            seen.append(request)
            walk.takes_absent = index + 1 < num_any
            if index in taken:
                self.queue.pop(request.request_id)
                del self.model[request.request_id]
            if len(seen) == num_seen:
                break
        assert seen == expected[: len(seen)] and len(seen) == min(num_seen, len(expected))

    @rule(digest=st.sampled_from("abc"), tier=st.sampled_from(Tier))
    def move(self, digest: str, tier: Tier) -> None:
        self.tiers[digest] = tier

    @rule(digest=st.sampled_from(["a", "b"]))
    def needing(self, digest: str) -> None:
        found = {request.request_id for request in self.queue.needing(digest)}
        assert found == {i for i, r in self.model.items() if digest in r.adapters.digests}

    @invariant()
    def everything_agrees(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.model)
        assert self.queue.num_tokens == 2 * len(self.model)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase


def test_a_skipped_flow_is_not_seen_again_in_the_walk() -> None:
    queue = make_queue()
    for index in range(4):
        queue.push(make_request(f"{index}", "a" if index % 2 else "b", arrival_s=float(index)))
    walk, seen = queue.walk(), []
    for request in walk:
        seen.append(request.request_id)
        if request.adapters.digests == ("a",):
            walk.skip_flow()
    assert seen == ["0", "1", "2"]


def test_a_tenant_that_is_charged_during_a_walk_lets_the_others_go_first() -> None:
    served: Counter[str] = Counter()
    queue = make_queue(served)
    for index in range(6):
        queue.push(make_request(f"{index}", tenant="tu"[index // 3], arrival_s=float(index)))
    seen = []
    for request in queue.walk():
        seen.append(request.request_id)
        served[request.tenant] += 2
    assert seen == ["0", "3", "1", "4", "2", "5"]


@pytest.mark.hostile
def test_a_priority_never_puts_a_tenant_before_another() -> None:
    queue = make_queue()
    queue.push(make_request("acme", tenant="acme", arrival_s=1.0))
    for index in range(3):
        urgent = {"tenant": "globex", "priority": -(1 << 31), "arrival_s": 2.0 + index}
        queue.push(make_request(f"globex{index}", **urgent))
    assert names(queue)[0] == "acme"


@pytest.mark.hostile
def test_a_priority_moves_running_requests_within_the_positions_of_their_tenant() -> None:
    requests = [
        make_request("a", tenant="globex", arrival_s=1.0),
        make_request("b", tenant="acme", arrival_s=2.0),
        make_request("c", tenant="globex", priority=-9, arrival_s=3.0),
        make_request("d", tenant="acme", priority=5, arrival_s=4.0),
        make_request("e", tenant="acme", arrival_s=5.0),
    ]
    assert [r.request_id for r in running_order(requests)] == ["c", "b", "a", "e", "d"]


def test_requests_for_running_adapters_go_first_until_another_has_aged() -> None:
    queue = make_queue()
    queue.push(make_request("new", "cold", arrival_s=1.0))
    queue.push(make_request("hot", "hot", arrival_s=2.0))
    queue.push(make_request("base", arrival_s=3.0))
    in_use = frozenset({"hot"})
    assert names(queue, Cluster(in_use, since_s=0.0)) == ["hot", "base", "new"]
    assert names(queue, Cluster(in_use, since_s=1.0)) == ["new", "hot", "base"]


def test_clustering_reorders_neither_tenants_nor_priorities() -> None:
    queue = make_queue(Counter(acme=10))
    queue.push(make_request("served less", "n", tenant="globex", arrival_s=1.0))
    queue.push(make_request("urgent", "n", tenant="acme", priority=-1, arrival_s=2.0))
    queue.push(make_request("new", "n", tenant="acme", arrival_s=3.0))
    queue.push(make_request("hot", "h", tenant="acme", arrival_s=4.0))
    found = names(queue, Cluster(frozenset({"h"}), since_s=0.0))
    assert found == ["served less", "urgent", "hot", "new"]


def test_a_walk_looks_only_at_the_tenants_that_come_up() -> None:
    looks: Counter[str] = Counter()

    def tier_of(digest: str) -> Tier:
        looks[digest] += 1
        return Tier.DEVICE

    queue = WaitingQueue(tier_of, Counter({f"{t}": t for t in range(100)}).__getitem__)
    for index in range(1000):
        queue.push(make_request(f"{index}", f"{index}", tenant=f"{index % 100}"))
    walk = queue.walk()
    assert [next(walk).request_id for _ in range(10)] == [f"{100 * i}" for i in range(10)]
    assert looks.total() < 30
