"""The admission queue: bounds hold, order is kept, a tenant's limit affects no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.request import BACKGROUND_PRIORITY
from loraplex.errors import DeadlineExceeded, ResourceExhausted
from loraplex_services.gateway.admission.dispatch_window import Window
from loraplex_services.gateway.admission.queue import AdmissionLimits, AdmissionQueue, Decision
from loraplex_services.gateway.admission.request import AdmissionRequest


def test_runs_until_full_then_waits_then_refuses() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=1))
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.WAIT
    with pytest.raises(ResourceExhausted) as caught:
        queue.offer(AdmissionRequest("a"), 0.0)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1


@pytest.mark.hostile
def test_priority_puts_no_tenant_before_another() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    running = AdmissionRequest("globex", priority=-(1 << 31))
    queue.offer(running, 0.0)
    urgent = [AdmissionRequest("globex", priority=-(1 << 31)) for _ in range(50)]
    for request in urgent:
        queue.offer(request, 0.0)
    polite = AdmissionRequest("acme")
    assert queue.offer(polite, 0.0) is Decision.WAIT
    queue.release(running, 1.0)
    assert queue.take_ready() == [polite]


@pytest.mark.hostile
def test_full_queue_sheds_no_other_tenants_request_for_an_urgent_one() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=2))
    polite = [AdmissionRequest("acme") for _ in range(2)]
    for request in polite:
        queue.offer(request, 0.0)
    urgent = [AdmissionRequest("globex", priority=-priority) for priority in (1, 2, 2)]
    queue.offer(urgent[0], 0.0)
    queue.offer(urgent[1], 0.0)
    assert queue.dropped == [urgent[0]], "its own, which was less urgent"
    with pytest.raises(ResourceExhausted):
        queue.offer(urgent[2], 0.0)
    assert queue.dropped == [urgent[0]]


@pytest.mark.hostile
def test_a_client_that_leaves_takes_its_requests_out_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To search 4,000 waiting requests for each of 1,000 takes the event loop seconds."""
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    queue.offer(AdmissionRequest("globex"), 0.0)
    waiting = [AdmissionRequest("globex") for _ in range(100)]
    for request in waiting:
        queue.offer(request, 0.0)
    comparisons = []
    monkeypatch.setattr(AdmissionRequest, "__eq__", lambda *pair: comparisons.append(pair))
    for request in waiting[:0:-1]:
        queue.withdraw(request)
    assert not comparisons
    assert queue.num_waiting == 1


def _order_after(queue: AdmissionQueue, running: AdmissionRequest) -> list[AdmissionRequest]:
    """The waiting requests in the order in which they run, one at a time."""
    order = []
    while queue.num_waiting:
        queue.release(running, 1.0)
        (running,) = queue.take_ready()
        order.append(running)
    return order


def test_urgent_request_passes_only_those_of_its_own_tenant() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    running = AdmissionRequest("z")
    queue.offer(running, 0.0)
    early, urgent = AdmissionRequest("z"), AdmissionRequest("z", priority=-1)
    other = AdmissionRequest("b")
    for request in (early, other, urgent):
        queue.offer(request, 0.0)
    assert _order_after(queue, running) == [other, urgent, early]


def test_waiting_tickets_start_by_priority_then_arrival() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    running = AdmissionRequest("a")
    queue.offer(running, 0.0)
    early, late, urgent = (
        AdmissionRequest("a"),
        AdmissionRequest("a"),
        AdmissionRequest("a", priority=-1),
    )
    for request in (early, late, urgent):
        queue.offer(request, 0.0)
    assert _order_after(queue, running) == [urgent, early, late]


def test_tenant_at_its_limit_delays_nobody_else() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=10))
    queue.tenant_limits["greedy"] = 1
    assert queue.offer(AdmissionRequest("greedy"), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("greedy"), 0.0) is Decision.WAIT
    assert queue.offer(AdmissionRequest("polite"), 0.0) is Decision.RUN


def test_a_tenant_whose_requests_stay_in_flight_delays_nobody_else() -> None:
    """As those do whose grammars a worker compiles for seconds. They were served least."""
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(256, batch_capacity=100, max_tokens=1024)
    stuck = [AdmissionRequest("stuck") for _ in range(12)]
    decisions = [queue.offer(request, 0.0) for request in stuck]
    assert decisions == [Decision.RUN] * 8 + [Decision.WAIT] * 4
    polite = [AdmissionRequest("polite") for _ in range(3)]
    decisions = [queue.offer(request, 0.0) for request in polite]
    assert decisions == [Decision.RUN] * 2 + [Decision.WAIT]
    queue.charge(polite[0], 10_000)
    queue.first_token(polite[0])
    assert queue.take_ready() == [polite[2]]


def test_request_with_more_choices_than_the_limit_runs_alone() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=4))
    assert queue.offer(AdmissionRequest("a", cost=100), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.WAIT


def test_a_ticket_starts_in_time_for_its_first_token_or_is_refused() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.RUN
    due = AdmissionRequest("a", deadline_s=100.0, run_s=1.0, first_token_due_s=5.0)
    assert due.start_by_s == 5.0
    assert AdmissionRequest("a", deadline_s=4.0, run_s=1.0, first_token_due_s=5.0).start_by_s == 3.0
    assert queue.offer(due, 0.0) is Decision.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(AdmissionRequest("a", deadline_s=100.0, first_token_due_s=1.0), 2.0)


def test_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    first, second = AdmissionRequest("a"), AdmissionRequest("a")
    queue.offer(first, 0.0)
    queue.offer(second, 0.0)
    queue.release(first, held_s=10.0)
    queue.take_ready()
    with pytest.raises(DeadlineExceeded):
        queue.offer(AdmissionRequest("a", deadline_s=15.0), now_s=10.0)
    assert queue.offer(AdmissionRequest("a", deadline_s=25.0), now_s=10.0) is Decision.WAIT


def test_until_a_request_has_ended_waits_are_estimated_from_run_times() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    assert queue.offer(AdmissionRequest("a", run_s=2.0), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("a", deadline_s=4.5, run_s=2.0), 0.0) is Decision.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(AdmissionRequest("a", deadline_s=5.5, run_s=2.0), 0.0)


def test_requests_that_await_a_fetch_keep_nobody_else_waiting() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(256, fetching_tokens=1024)
    fetching = [AdmissionRequest("a", awaits_fetch=True) for _ in range(9)]
    decisions = [queue.offer(request, 0.0) for request in fetching[:8]]
    assert decisions == [Decision.RUN] * 8
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.RUN
    assert queue.offer(fetching[8], 0.0) is Decision.WAIT
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.RUN
    assert queue.first_token(fetching[0])
    assert queue.take_ready() == [fetching[8]]


def test_a_newcomer_passes_waiting_requests_for_adapters_that_were_served_more() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(256)
    running = AdmissionRequest("a", adapters="popular")
    assert queue.offer(running, 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("a", adapters="rare"), 0.0) is Decision.RUN
    queue.charge(running, 100)
    long = AdmissionRequest("a", adapters="popular", num_prompt_tokens=200)
    assert queue.offer(long, 0.0) is Decision.WAIT
    queue.first_token(running)
    assert not queue.take_ready(), "it is too long for the window"
    assert queue.offer(AdmissionRequest("a", adapters="popular"), 0.0) is Decision.WAIT
    assert queue.offer(AdmissionRequest("a", adapters="rare"), 0.0) is Decision.RUN


def test_a_newcomer_passes_waiting_tenants_that_were_served_more() -> None:
    """Its own requests it does not pass, even when there would be room for it."""
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(256)
    polite = AdmissionRequest("polite")
    assert queue.offer(polite, 0.0) is Decision.RUN
    greedy = [AdmissionRequest("greedy") for _ in range(6)]
    decisions = [queue.offer(request, 0.0) for request in greedy]
    assert decisions == [Decision.RUN] * 2 + [Decision.WAIT] * 4
    queue.charge(greedy[0], 100)
    assert queue.offer(AdmissionRequest("polite"), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("polite"), 0.0) is Decision.WAIT
    queue.first_token(polite)
    assert queue.offer(AdmissionRequest("polite"), 0.0) is Decision.WAIT


@given(
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans())),
    per_tenant=st.integers(0, 3),
)
def test_bounds_hold_and_every_request_starts(
    moves: list[tuple[str, int, bool]], per_tenant: int
) -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=4))
    if per_tenant:
        queue.tenant_limits = dict.fromkeys("abc", per_tenant)
    running: list[AdmissionRequest] = []
    waiting: list[AdmissionRequest] = []

    def end_one() -> None:
        queue.release(running.pop(0), 1.0)
        for request in queue.take_ready():
            waiting.remove(request)
            running.append(request)

    for tenant, cost, ends in moves:
        request = AdmissionRequest(tenant, cost)
        verdict = queue.offer(request, 0.0)
        (running if verdict is Decision.RUN else waiting).append(request)
        if ends and running:
            end_one()
        assert queue.num_running == sum(t.cost for t in running) <= max(4, len(running) and 4)
        if per_tenant:
            for name in "abc":
                mine = [t.cost for t in running if t.tenant == name]
                assert len(mine) <= 1 or sum(mine) <= per_tenant
    while running:
        end_one()
    assert waiting == []
    assert queue.num_running == 0


def test_full_queue_sheds_the_newest_of_the_tenant_that_waits_most() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=3))
    greedy = [AdmissionRequest("greedy") for _ in range(4)]
    for request in greedy:
        queue.offer(request, 0.0)
    assert queue.offer(AdmissionRequest("polite"), 0.0) is Decision.WAIT
    assert queue.dropped == [greedy[-1]]
    with pytest.raises(ResourceExhausted):
        queue.offer(AdmissionRequest("greedy"), 0.0)
    assert queue.num_waiting == 3


def test_full_queue_sheds_the_less_urgent_of_the_same_tenant() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=1))
    running, waiting = AdmissionRequest("a"), AdmissionRequest("a")
    queue.offer(running, 0.0)
    queue.offer(waiting, 0.0)
    assert queue.offer(AdmissionRequest("a", priority=-1), 0.0) is Decision.WAIT
    assert queue.dropped == [waiting]


def test_tenant_with_little_waiting_expects_a_short_wait() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=2))
    first = AdmissionRequest("greedy")
    queue.offer(first, 0.0)
    for _ in range(101):
        queue.offer(AdmissionRequest("greedy"), 0.0)
    queue.release(first, held_s=1.0)
    queue.take_ready()
    assert queue.expected_wait_s("greedy") == pytest.approx(queue.expected_wait_s(), rel=0.02)
    assert queue.expected_wait_s("polite") == pytest.approx(1.0)
    assert queue.offer(AdmissionRequest("polite", deadline_s=3.0, run_s=1.0), 0.0) is Decision.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(AdmissionRequest("polite", deadline_s=3.0, run_s=2.0), 0.0)


def background(tenant: str, cost: int = 1) -> AdmissionRequest:
    return AdmissionRequest(tenant, cost, priority=BACKGROUND_PRIORITY)


def test_background_requests_fill_half_of_what_others_leave() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(batch_capacity=10)
    decisions = [queue.offer(background(tenant), 0.0) for tenant in "abababab"]
    assert decisions == [Decision.RUN] * 5 + [Decision.WAIT] * 3
    others = [AdmissionRequest("c") for _ in range(5)]
    assert {queue.offer(request, 0.0) for request in others} == {Decision.RUN}
    assert queue.background_limit == 2 and queue.take_ready() == []
    for request in others:
        queue.release(request, 1.0)
    assert queue.background_limit == 5


def test_background_requests_wait_for_those_of_all_tenants() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    first = AdmissionRequest("a")
    queue.offer(first, 0.0)
    batch = background("b")
    assert queue.offer(batch, 0.0) is Decision.WAIT
    # Tenant a was served, tenant b was not; the request of a goes first nevertheless.
    second = AdmissionRequest("a")
    assert queue.offer(second, 0.0) is Decision.WAIT
    queue.release(first, 1.0)
    assert queue.take_ready() == [second]
    queue.release(second, 1.0)
    assert queue.take_ready() == [batch]


def test_a_request_passes_the_background_requests_that_wait() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(batch_capacity=4)
    for _ in range(3):
        queue.offer(background("b"), 0.0)
    assert queue.num_waiting == 1
    assert queue.offer(AdmissionRequest("b"), 0.0) is Decision.RUN
    assert queue.offer(AdmissionRequest("a"), 0.0) is Decision.RUN


def test_background_requests_leave_half_of_their_tenants_own_limit() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(batch_capacity=100)
    queue.tenant_limits["a"] = 4
    decisions = [queue.offer(background("a"), 0.0) for _ in range(3)]
    assert decisions == [Decision.RUN, Decision.RUN, Decision.WAIT]
    assert queue.offer(AdmissionRequest("a", 2), 0.0) is Decision.RUN
    assert queue.offer(background("b"), 0.0) is Decision.RUN


def test_a_large_background_request_runs_alone() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(batch_capacity=4)
    large = background("a", cost=50)
    assert queue.offer(large, 0.0) is Decision.RUN
    assert queue.offer(background("a"), 0.0) is Decision.WAIT
    queue.release(large, 1.0)
    assert len(queue.take_ready()) == 1


def test_background_requests_do_not_count_against_their_tenant() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    batch = background("a")
    queue.offer(batch, 0.0)
    queue.charge(batch, 1_000_000)
    blocker = AdmissionRequest("c", cost=4095)
    queue.offer(blocker, 0.0)
    other = AdmissionRequest("b", num_prompt_tokens=10)
    mine = AdmissionRequest("a", num_prompt_tokens=10)
    assert [queue.offer(each, 0.0) for each in (mine, other)] == [Decision.WAIT] * 2
    queue.release(batch, 1.0)
    assert queue.take_ready() == [mine]
