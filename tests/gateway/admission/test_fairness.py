"""Virtual token counters and the queue over them: service stays even between who waits."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.admission.dispatch_window import Room
from services.gateway.admission.fairness import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, ServiceCounters
from services.gateway.admission.queue import (
    AdmissionLimits,
    AdmissionQueue,
    Ticket,
    Verdict,
)


def test_tenant_that_was_away_earns_no_credit() -> None:
    served = ServiceCounters()
    served.arrive("busy")
    served.charge("busy", 1000, 0, 1.0)
    served.arrive("late")
    assert served.counters["late"] == served.counters["busy"]


def test_tenant_that_leaves_for_a_moment_keeps_its_account() -> None:
    served = ServiceCounters()
    for tenant in ("greedy", "polite"):
        served.arrive(tenant)
    served.charge("greedy", 1000, 0, 1.0)
    served.leave("greedy")
    served.arrive("greedy")
    assert served.least_served(["greedy", "polite"]) == "polite"


def test_many_tenants_that_left_are_forgotten() -> None:
    served = ServiceCounters()
    for number in range(10_000):
        served.arrive(str(number))
        served.leave(str(number))
    assert len(served.counters) <= 4097


class _Engine:
    """A queue with two tenants that always have more, and a batch that makes a token a step."""

    def __init__(self, seed: int, slots: int, weights: dict[str, float]) -> None:
        self.rng = random.Random(seed)
        self.queue = AdmissionQueue(AdmissionLimits(max_running=slots))
        self.running: dict[Ticket, int] = {}
        self.service: Counter[str] = Counter()
        self.weights = weights
        self.waiting: Counter[str] = Counter()
        self.max_prompt, self.max_output = 50, 30

    def keep_waiting(self, tenant: str) -> None:
        while self.waiting[tenant] < 3:
            prompt = self.rng.randint(1, self.max_prompt)
            ticket = Ticket(tenant, num_prompt_tokens=prompt, weight=self.weights[tenant])
            if self.queue.offer(ticket, 0.0) is Verdict.RUN:
                self.start(ticket)
            else:
                self.waiting[tenant] += 1

    def start(self, ticket: Ticket) -> None:
        self.running[ticket] = self.rng.randint(1, self.max_output)
        self.add(ticket, ticket.num_prompt_tokens * INPUT_TOKEN_COST)

    def add(self, ticket: Ticket, cost: float) -> None:
        self.service[ticket.tenant] += cost / ticket.weight  # type: ignore[assignment]

    def step(self) -> None:
        for ticket in list(self.running):
            self.queue.first_token(ticket)
            self.queue.charge(ticket, 1)
            self.add(ticket, OUTPUT_TOKEN_COST)
            self.running[ticket] -= 1
            if not self.running[ticket]:
                del self.running[ticket]
                self.queue.release(ticket, 1.0)
        for ticket in self.queue.take_ready():
            self.waiting[ticket.tenant] -= 1
            self.start(ticket)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 8),
    weight=st.sampled_from([1.0, 2.0, 0.5]),
)
def test_service_of_two_tenants_that_wait_stays_within_the_bound(
    seed: int, slots: int, weight: float
) -> None:
    """|W_a - W_b| <= 2 max(w_p longest prompt, w_q tokens of the largest batch)."""
    engine = _Engine(seed, slots, {"a": 1.0, "b": weight})
    light = min(1.0, weight)
    batch_tokens = slots * (engine.max_prompt + engine.max_output)
    one = max(INPUT_TOKEN_COST * engine.max_prompt, OUTPUT_TOKEN_COST * batch_tokens)
    for _ in range(400):
        for tenant in "ab":
            engine.keep_waiting(tenant)
        engine.step()
        assert abs(engine.service["a"] - engine.service["b"]) <= 2 * one / light
    assert min(engine.service.values()) > one


@given(
    seed=st.integers(0, 10_000),
    room=st.integers(1, 3000),
    prompts=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
)
def test_only_so_many_tokens_are_sent_ahead(seed: int, room: int, prompts: list[int]) -> None:
    """Never more than three rooms, but for one request that is larger by itself."""
    rng = random.Random(seed)
    queue = AdmissionQueue(AdmissionLimits())
    queue.room = Room(room)
    tickets = [Ticket(rng.choice("ab"), num_prompt_tokens=n) for n in prompts]
    ahead = [t for t in tickets if queue.offer(t, 0.0) is Verdict.RUN]
    started = list(ahead)
    while ahead:
        total = sum(t.ahead_tokens for t in ahead)
        assert total <= 3 * room or len(ahead) == 1
        ticket = ahead.pop(rng.randrange(len(ahead)))
        if rng.random() < 0.5:
            queue.first_token(ticket)
        else:
            queue.release(ticket, 1.0)
        new = queue.take_ready()
        ahead += new
        started += new
    assert sorted(t.number for t in started) == [t.number for t in tickets]
