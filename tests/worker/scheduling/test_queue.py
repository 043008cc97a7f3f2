"""The queue against a plain sorted list."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.request import AdapterSet, Request, SamplingParams
from services.worker.scheduling.policies import FIRST_COME, Policy, QueueView
from services.worker.scheduling.queue import WaitingQueue

VIEW = QueueView(0.0, ())


def make_request(name: str, digest: str = "", **fields: object) -> Request:
    adapters = AdapterSet(((digest, 1.0),)) if digest else AdapterSet()
    return Request(name, [1, 2], SamplingParams(4, 0), adapters, **fields)


class QueueMachine(RuleBasedStateMachine):
    """Pushes, pops and walks, taking some requests on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.model: dict[str, Request] = {}
        self.count = 0
        self.served: Counter[str] = Counter()

    def rising(self, request: Request, view: QueueView) -> tuple[float, ...]:
        """Like `fair`: by what the tenant was served, then the adapter."""
        own = self.served[request.tenant + request.adapters.digests[0]]
        return (request.priority, self.served[request.tenant], own, request.arrival_s)

    def in_order(self, policy: Policy) -> list[str]:
        by_key = sorted(self.model.values(), key=lambda r: (policy.key(r, VIEW), int(r.request_id)))
        return [request.request_id for request in by_key]

    @rule(
        digest=st.sampled_from(["a", "b", "c"]),
        tenant=st.sampled_from("tu"),
        priority=st.integers(0, 1),
        delay_s=st.sampled_from([0.0, 1.0]),
    )
    def push(self, digest: str, tenant: str, priority: int, delay_s: float) -> None:
        self.count += 1
        request = make_request(
            f"{self.count}",
            digest,
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

    @rule(taken=st.sets(st.integers(0, 20)), num_seen=st.integers(1, 30))
    def walk(self, taken: set[int], num_seen: int) -> None:
        """The order is seen, whatever is taken on the way and wherever the walk ends."""
        expected, seen = self.in_order(Policy(self.rising)), []
        for index, request in enumerate(self.queue.walk(Policy(self.rising), VIEW)):
            seen.append(request.request_id)
            if index in taken:
                self.queue.pop(request.request_id)
                del self.model[request.request_id]
            if len(seen) == num_seen:
                break
        assert seen == expected[: len(seen)] and len(seen) == min(num_seen, len(expected))

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
    queue = WaitingQueue()
    for index in range(4):
        queue.push(make_request(f"{index}", "a" if index % 2 else "b", arrival_s=float(index)))
    walk, seen = queue.walk(FIRST_COME, VIEW), []
    for request in walk:
        seen.append(request.request_id)
        if request.adapters.digests == ("a",):
            walk.skip_flow()
    assert seen == ["0", "1", "2"]


def test_a_walk_computes_keys_of_what_comes_up_and_not_of_all_that_wait() -> None:
    queue = WaitingQueue()
    for index in range(1000):
        request = make_request(f"{index}", f"{index % 50}", tenant=f"{index % 7}")
        request.arrival_s = float(index)
        queue.push(request)
    served: Counter[str] = Counter()
    num_keys = 0

    def counting(request: Request, view: QueueView) -> tuple[float, ...]:
        nonlocal num_keys
        num_keys += 1
        return (request.priority, served[request.tenant], request.arrival_s)

    assert next(queue.walk(Policy(counting), VIEW)).request_id == "0"
    num_keys = 0
    for number in range(100):  # all tenants are served alike
        served.update(f"{tenant}" for tenant in range(7))
        assert next(queue.walk(Policy(counting), VIEW)).request_id == f"{number}"
        queue.pop(f"{number}")
    assert num_keys < 100 * 4 * 7
