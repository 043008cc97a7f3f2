"""Admission: bounds hold, nobody overtakes, a tenant's limit is its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import DeadlineExceeded, ResourceExhausted
from services.gateway.admission.dispatch_window import Room
from services.gateway.admission.queue import AdmissionLimits, AdmissionQueue, Ticket, Verdict


def test_runs_until_full_then_waits_then_refuses() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=1))
    assert queue.offer(Ticket("a"), 0.0) is Verdict.RUN
    assert queue.offer(Ticket("a"), 0.0) is Verdict.WAIT
    with pytest.raises(ResourceExhausted) as caught:
        queue.offer(Ticket("a"), 0.0)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1


def test_waiting_tickets_start_by_priority_then_arrival() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    running = Ticket("a")
    queue.offer(running, 0.0)
    early, late, urgent = Ticket("a"), Ticket("a"), Ticket("a", priority=-1)
    for ticket in (early, late, urgent):
        queue.offer(ticket, 0.0)
    order = []
    for _ in range(3):
        queue.release(running, 1.0)
        (running,) = queue.take_ready()
        order.append(running)
    assert order == [urgent, early, late]


def test_tenant_at_its_limit_delays_nobody_else() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=10, max_running_per_tenant=1))
    assert queue.offer(Ticket("greedy"), 0.0) is Verdict.RUN
    assert queue.offer(Ticket("greedy"), 0.0) is Verdict.WAIT
    assert queue.offer(Ticket("polite"), 0.0) is Verdict.RUN


def test_request_with_more_choices_than_the_limit_runs_alone() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=4))
    assert queue.offer(Ticket("a", cost=100), 0.0) is Verdict.RUN
    assert queue.offer(Ticket("a"), 0.0) is Verdict.WAIT


def test_a_ticket_starts_in_time_for_its_first_token_or_is_refused() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    assert queue.offer(Ticket("a"), 0.0) is Verdict.RUN
    due = Ticket("a", deadline_s=100.0, run_s=1.0, first_token_due_s=5.0)
    assert due.start_by_s == 5.0
    assert Ticket("a", deadline_s=4.0, run_s=1.0, first_token_due_s=5.0).start_by_s == 3.0
    assert queue.offer(due, 0.0) is Verdict.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(Ticket("a", deadline_s=100.0, first_token_due_s=1.0), 2.0)


def test_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    first, second = Ticket("a"), Ticket("a")
    queue.offer(first, 0.0)
    queue.offer(second, 0.0)
    queue.release(first, held_s=10.0)
    queue.take_ready()
    with pytest.raises(DeadlineExceeded):
        queue.offer(Ticket("a", deadline_s=15.0), now_s=10.0)
    assert queue.offer(Ticket("a", deadline_s=25.0), now_s=10.0) is Verdict.WAIT


def test_until_anything_has_ended_waits_are_told_by_what_a_request_should_take() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    assert queue.offer(Ticket("a", run_s=2.0), 0.0) is Verdict.RUN
    assert queue.offer(Ticket("a", deadline_s=4.5, run_s=2.0), 0.0) is Verdict.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(Ticket("a", deadline_s=5.5, run_s=2.0), 0.0)


def test_requests_that_await_adapters_keep_nobody_who_is_ready_waiting() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.room = Room(256, loading_tokens=1024)
    loading = [Ticket("a", awaits_adapter=True) for _ in range(9)]
    verdicts = [queue.offer(ticket, 0.0) for ticket in loading[:8]]
    assert verdicts == [Verdict.RUN] * 8
    assert queue.offer(Ticket("a"), 0.0) is Verdict.RUN
    assert queue.offer(loading[8], 0.0) is Verdict.WAIT
    assert queue.first_token(loading[0])
    assert queue.take_ready() == [loading[8]]


def test_a_newcomer_passes_waiting_tenants_that_were_served_more() -> None:
    """Its own requests it does not pass, even when there would be room for it."""
    queue = AdmissionQueue(AdmissionLimits())
    queue.room = Room(256)
    polite = Ticket("polite")
    assert queue.offer(polite, 0.0) is Verdict.RUN
    greedy = [Ticket("greedy") for _ in range(6)]
    verdicts = [queue.offer(ticket, 0.0) for ticket in greedy]
    assert verdicts == [Verdict.RUN] * 2 + [Verdict.WAIT] * 4
    queue.charge(greedy[0], 100)
    assert queue.offer(Ticket("polite"), 0.0) is Verdict.RUN
    assert queue.offer(Ticket("polite"), 0.0) is Verdict.WAIT
    queue.first_token(polite)
    assert queue.offer(Ticket("polite"), 0.0) is Verdict.WAIT


@given(
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans())),
    per_tenant=st.integers(0, 3),
)
def test_bounds_hold_and_everybody_gets_a_turn(
    moves: list[tuple[str, int, bool]], per_tenant: int
) -> None:
    limits = AdmissionLimits(max_running=4, max_running_per_tenant=per_tenant)
    queue = AdmissionQueue(limits)
    running: list[Ticket] = []
    waiting: list[Ticket] = []

    def end_one() -> None:
        queue.release(running.pop(0), 1.0)
        for ticket in queue.take_ready():
            waiting.remove(ticket)
            running.append(ticket)

    for tenant, cost, ends in moves:
        ticket = Ticket(tenant, cost)
        verdict = queue.offer(ticket, 0.0)
        (running if verdict is Verdict.RUN else waiting).append(ticket)
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
    greedy = [Ticket("greedy") for _ in range(4)]
    for ticket in greedy:
        queue.offer(ticket, 0.0)
    assert queue.offer(Ticket("polite"), 0.0) is Verdict.WAIT
    assert queue.shed == [greedy[-1]]
    with pytest.raises(ResourceExhausted):
        queue.offer(Ticket("greedy"), 0.0)
    assert queue.num_waiting == 3


def test_full_queue_sheds_the_less_urgent_whoever_sent_them() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1, max_waiting=1))
    running, waiting = Ticket("a"), Ticket("a")
    queue.offer(running, 0.0)
    queue.offer(waiting, 0.0)
    assert queue.offer(Ticket("a", priority=-1), 0.0) is Verdict.WAIT
    assert queue.shed == [waiting]


def test_tenant_with_little_waiting_expects_a_short_wait() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=2))
    first = Ticket("greedy")
    queue.offer(first, 0.0)
    for _ in range(101):
        queue.offer(Ticket("greedy"), 0.0)
    queue.release(first, held_s=1.0)
    queue.take_ready()
    assert queue.expected_wait_s("greedy") == pytest.approx(queue.expected_wait_s(), rel=0.02)
    assert queue.expected_wait_s("polite") == pytest.approx(1.0)
    assert queue.offer(Ticket("polite", deadline_s=3.0, run_s=1.0), 0.0) is Verdict.WAIT
    with pytest.raises(DeadlineExceeded):
        queue.offer(Ticket("polite", deadline_s=3.0, run_s=2.0), 0.0)
