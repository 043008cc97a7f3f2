"""The queue against a plain sorted list."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.api.request import AdapterSet
from loraplex.api.residency import Tier
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.scheduling.policies import FIRST_COME, Policy, QueueView, clustered
from loraplex_services.worker.scheduling.queue import WaitingQueue
from loraplex_services.worker.types.request import Request

VIEW = QueueView(0.0, ())
HERE = (Tier.DEVICE, False)


def own(request: Request) -> str:
    return ",".join(request.adapters.digests)


def make_request(name: str, *digests: str, **fields: object) -> Request:
    adapters = AdapterSet(tuple((digest, 1.0) for digest in digests))
    return Request(name, [1, 2], SamplingParams(4, 0), adapters, **fields)


class QueueMachine(RuleBasedStateMachine):
    """Pushes, pops and walks, taking some requests on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.served: Counter[str] = Counter()
        self.now = 0.0
        self.adapters = dict.fromkeys("abc", HERE)
        self.moved: set[str] = set()
        self.policy = self.make_policy()
        self.queue = WaitingQueue(self.adapters.__getitem__, self.policy)
        self.model: dict[str, Request] = {}
        self.count = 0

    def make_policy(self) -> Policy:
        """Like `fair`: by what the tenant was served, then the adapter."""
        return Policy(
            lambda request, view: (self.served[request.tenant],),
            lambda request, view: (
                request.priority,
                self.served[request.tenant + own(request)],
                request.arrival_s,
            ),
            num_tenant_parts=1,
        )

    def view(self) -> QueueView:
        in_use = frozenset(digest for digest, (_, in_use) in self.adapters.items() if in_use)
        return QueueView(self.now, in_use, len(self.model), num_running=8)

    def tier(self, request: Request) -> Tier:
        tiers = (self.adapters[digest][0] for digest in request.adapters.digests)
        return min(tiers, default=Tier.DEVICE)

    def in_order(self) -> list[Request]:
        view = self.view()
        requests = (r for r in self.model.values() if self.tier(r) > Tier.NONE)
        return sorted(requests, key=lambda r: (self.policy.key(r, view), int(r.request_id)))

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

    @rule(tenant=st.sampled_from("tu"), digest=st.sampled_from("abc"), cost=st.integers(1, 5))
    def charge(self, tenant: str, digest: str, cost: int) -> None:
        self.served[tenant] += cost
        self.served[tenant + digest] += cost

    @rule(
        taken=st.sets(st.integers(0, 20)), num_seen=st.integers(1, 30), num_any=st.integers(0, 40)
    )
    def walk(self, taken: set[int], num_seen: int, num_any: int) -> None:
        """The order is seen, whatever is taken on the way and wherever the walk ends, and from some
        place on without those whose adapters are not on the device."""
        expected = self.in_order()
        ready = [request for request in expected[num_any:] if self.tier(request) == Tier.DEVICE]
        expected[num_any:] = ready
        walk, seen = self.queue.walk(self.view(), self.moved), []
        self.moved = set()
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

    @rule(
        digest=st.sampled_from("abc"),
        tier=st.sampled_from(Tier),
        in_use=st.booleans(),
    )
    def move(self, digest: str, tier: Tier, in_use: bool) -> None:
        self.adapters[digest] = (tier, in_use)
        self.moved.add(digest)

    @rule(passed_s=st.integers(0, 4))
    def go_on(self, passed_s: int) -> None:
        self.now += passed_s

    @rule(digest=st.sampled_from(["a", "b"]))
    def needing(self, digest: str) -> None:
        found = {request.request_id for request in self.queue.needing(digest)}
        assert found == {i for i, r in self.model.items() if digest in r.adapters.digests}

    @invariant()
    def everything_agrees(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.model)
        assert self.queue.num_tokens == 2 * len(self.model)


class ClusteredQueueMachine(QueueMachine):
    """The same by what is in use, where keys fall too."""

    def make_policy(self) -> Policy:
        return clustered(FIRST_COME, 1, max_age_s=3.0, min_queue=0.5)


class FairClusteredQueueMachine(QueueMachine):
    """Both: by what the tenant was served, then by what is in use."""

    def make_policy(self) -> Policy:
        return clustered(super().make_policy(), 1, max_age_s=3.0, min_queue=0.5)


class FirstComeQueueMachine(QueueMachine):
    """The same by arrival."""

    def make_policy(self) -> Policy:
        return FIRST_COME


MACHINES = (QueueMachine, ClusteredQueueMachine, FairClusteredQueueMachine, FirstComeQueueMachine)
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase
TestClusteredQueue = ClusteredQueueMachine.TestCase
TestFairClusteredQueue = FairClusteredQueueMachine.TestCase
TestFirstComeQueue = FirstComeQueueMachine.TestCase


def test_a_skipped_flow_is_not_seen_again_in_the_walk() -> None:
    queue = WaitingQueue(lambda digest: HERE)
    for index in range(4):
        queue.push(make_request(f"{index}", "a" if index % 2 else "b", arrival_s=float(index)))
    walk, seen = queue.walk(VIEW, ()), []
    for request in walk:
        seen.append(request.request_id)
        if request.adapters.digests == ("a",):
            walk.skip_flow()
    assert seen == ["0", "1", "2"]


def counting(policy: Policy, counts: Counter[str]) -> Policy:
    """The same order; counts keys by what they were asked of."""

    def own_key(request: Request, view: QueueView) -> tuple[float, ...]:
        counts["keys"] += 1
        return policy.own_key(request, view)

    return replace(policy, own_key=own_key)


def test_a_walk_computes_keys_of_what_comes_up_and_not_of_all_that_wait() -> None:
    served: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    by_tenant = Policy(lambda request, view: (served[request.tenant],), FIRST_COME.own_key, 1)
    queue = WaitingQueue(lambda digest: HERE, counting(by_tenant, counts))
    for index in range(1000):
        arrival_s = float(index)
        queue.push(
            make_request(f"{index}", f"{index % 50}", tenant=f"{index % 7}", arrival_s=arrival_s)
        )
    assert next(queue.walk(VIEW, ())).request_id == "0"
    counts.clear()
    for number in range(100):  # all tenants are served alike
        served.update(f"{tenant}" for tenant in range(7))
        assert next(queue.walk(VIEW, ())).request_id == f"{number}"
        queue.pop(f"{number}")
    assert counts["keys"] < 100 * 5 * 7


def test_clustering_looks_at_flows_whose_adapters_come_into_use_and_at_no_others() -> None:
    counts: Counter[str] = Counter()
    in_use: set[str] = set()
    policy = counting(clustered(FIRST_COME, 1, max_age_s=1e6, min_queue=0.0), counts)
    queue = WaitingQueue(lambda digest: (Tier.DEVICE, digest in in_use), policy)
    for index in range(1000):
        queue.push(make_request(f"{index}", f"{index}", arrival_s=float(index)))
    assert next(queue.walk(VIEW, ())).request_id == "0"
    counts.clear()
    for number in range(999, 899, -1):
        moved = {f"{number}", *in_use}
        in_use.clear()
        in_use.add(f"{number}")
        view = QueueView(0.0, in_use, 1000)
        assert next(queue.walk(view, moved)).request_id == f"{number}"
    assert counts["keys"] < 100 * 10


@pytest.mark.parametrize(
    "view",
    [QueueView(6.0, {"hot"}, 9, 9), QueueView(1.0, {"hot"}, 3, 9), QueueView(1.0, {"cold"}, 9, 9)],
    ids=["aged", "a short queue", "in use"],
)
def test_a_request_passed_over_by_clustering_comes_first_when_its_key_falls(
    view: QueueView,
) -> None:
    before, adapters = QueueView(1.0, {"hot"}, 9, 9), ("hot", "cold")
    in_use = before.in_use
    policy = clustered(FIRST_COME, 1, max_age_s=5.0, min_queue=0.5)
    queue = WaitingQueue(lambda digest: (Tier.DEVICE, digest in in_use), policy)
    queue.push(make_request("first", "cold", arrival_s=0.0))
    queue.push(make_request("second", "hot", arrival_s=1.0))
    assert next(queue.walk(before, adapters)).request_id == "second"
    in_use = view.in_use
    assert next(queue.walk(view, adapters)).request_id == "first"


def test_a_walk_that_takes_nothing_absent_looks_at_none_of_it() -> None:
    counts: Counter[str] = Counter()
    queue = WaitingQueue(lambda digest: (Tier.DISK, False), counting(FIRST_COME, counts))
    for index in range(1000):
        queue.push(make_request(f"{index}", f"{index}", arrival_s=float(index)))
    queue.push(make_request("base", arrival_s=1000.0))
    walk = queue.walk(VIEW, ())
    seen = [next(walk).request_id for _ in range(3)]
    counts.clear()
    walk.takes_absent = False
    assert [*seen, *(r.request_id for r in walk)] == ["0", "1", "2", "base"]
    assert counts["keys"] < 10
