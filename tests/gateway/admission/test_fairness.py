"""The queue over virtual token counters: service stays even between who waits."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.common.virtual_counters import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from loraplex_services.gateway.admission.dispatch_window import Window
from loraplex_services.gateway.admission.queue import AdmissionLimits, AdmissionQueue, Decision
from loraplex_services.gateway.admission.request import AdmissionRequest


class _Engine:
    """A queue with two tenants that always have more, and a batch that makes a token a step."""

    def __init__(self, seed: int, slots: int, weights: dict[str, float]) -> None:
        self.rng = random.Random(seed)
        self.queue = AdmissionQueue(AdmissionLimits(max_running=slots))
        self.running: dict[AdmissionRequest, int] = {}
        self.service: Counter[str] = Counter()
        self.weights = weights
        self.waiting: Counter[str] = Counter()
        self.max_prompt, self.max_output = 50, 30

    def keep_waiting(self, tenant: str) -> None:
        while self.waiting[tenant] < 3:
            prompt = self.rng.randint(1, self.max_prompt)
            request = AdmissionRequest(
                tenant, num_prompt_tokens=prompt, weight=self.weights[tenant]
            )
            if self.queue.offer(request, 0.0) is Decision.RUN:
                self.start(request)
            else:
                self.waiting[tenant] += 1

    def start(self, request: AdmissionRequest) -> None:
        self.running[request] = self.rng.randint(1, self.max_output)
        self.add(request, request.num_prompt_tokens * INPUT_TOKEN_COST)

    def add(self, request: AdmissionRequest, cost: float) -> None:
        self.service[request.tenant] += cost / request.weight  # type: ignore[assignment]

    def step(self) -> None:
        for request in list(self.running):
            self.queue.first_token(request)
            self.queue.charge(request, 1)
            self.add(request, OUTPUT_TOKEN_COST)
            self.running[request] -= 1
            if not self.running[request]:
                del self.running[request]
                self.queue.release(request, 1.0)
        for request in self.queue.take_ready():
            self.waiting[request.tenant] -= 1
            self.start(request)


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
    window=st.integers(1, 3000),
    prompts=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
)
def test_the_tokens_that_are_sent_ahead_are_bounded(
    seed: int, window: int, prompts: list[int]
) -> None:
    """Of each tenant never more than a window, but for one request that is larger by itself."""
    rng = random.Random(seed)
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(window)
    requests = [AdmissionRequest(rng.choice("ab"), num_prompt_tokens=n) for n in prompts]
    ahead = [t for t in requests if queue.offer(t, 0.0) is Decision.RUN]
    started = list(ahead)
    while ahead:
        for tenant in "ab":
            own = [t.in_flight_tokens for t in ahead if t.tenant == tenant]
            assert sum(own) <= window or len(own) == 1
        request = ahead.pop(rng.randrange(len(ahead)))
        if rng.random() < 0.5:
            queue.first_token(request)
        else:
            queue.release(request, 1.0)
        new = queue.take_ready()
        ahead += new
        started += new
    assert sorted(t.number for t in started) == [t.number for t in requests]
