"""What cannot make its deadline is given up in time, and nothing else is."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.worker.scheduling.early_abort import (
    MIN_SWEPT,
    Alarms,
    RemainingWork,
    ServiceTimes,
    latest_start_s,
)
from loraplex_services.worker.types.request import Request
from tests.worker.scheduling.stage import STEP_S, Stage, make_request

INFEASIBLE = "DEADLINE_INFEASIBLE"


def test_fetch_and_copy_come_on_top_of_the_prefill() -> None:
    times = ServiceTimes()
    times.prefills.add(10, 1.0)
    times.copies.add(0.5)
    for seconds in (6.0, 4.0):  # of which the faster may be hoped for: it costs nobody a step
        times.fetches.add(seconds)
    here = latest_start_s(20.0, RemainingWork(10), times, is_contended=True)
    on_disk = latest_start_s(20.0, RemainingWork(10, 1), times, is_contended=True)
    away = latest_start_s(20.0, RemainingWork(10, 1, fetched_for_s=1.0), times, is_contended=True)
    assert (here, on_disk, away) == (19.0, 18.5, 15.5)


def test_alone_a_request_may_hope_for_the_fastest_time_measured() -> None:
    times = ServiceTimes()
    for seconds in (1.0, 3.0):
        times.prefills.add(10, seconds)
    assert latest_start_s(9.0, RemainingWork(10), times, is_contended=True) == 6.0
    assert latest_start_s(9.0, RemainingWork(10), times, is_contended=False) == 8.0


def test_alarms_ring_in_order_and_forget_requests_that_ended() -> None:
    alarms = Alarms()
    requests = [make_request(f"{index}") for index in range(4 * MIN_SWEPT)]
    for index, request in enumerate(reversed(requests)):
        alarms.set(float(len(requests) - index), request)
    live = {id(request) for request in requests[::2]}
    due = alarms.due(10.0, lambda request: id(request) in live)
    assert due == requests[0:10:2]
    assert len(alarms) <= len(requests) // 2, "the ended are not kept until their deadline"


def serve(
    stage: Stage, arrivals: list[tuple[float, Request]], is_measuring: bool = True
) -> set[str]:
    """Play arrivals in time; returns who had the first token by its deadline."""
    stage.is_measuring = is_measuring
    todo = sorted(arrivals, key=lambda pair: pair[0])
    while todo or stage.scheduler.has_work:
        while todo and todo[0][0] <= stage.now:
            stage.submit(todo.pop(0)[1])
        stage.step()
    return {
        request.request_id
        for _, request in arrivals
        if request.first_token_s is not None
        and (request.deadline_s is None or request.first_token_s <= request.deadline_s)
    }


def make_stage() -> Stage:
    """Computes 16 tokens a second."""
    return Stage(400, prefix_cache=False, max_step_tokens=16, max_running=16)


def overload(
    num_requests: int, load: float, slo_s: float, first_token_s: float | None = None
) -> list[tuple[float, Request]]:
    """Poisson arrivals of prompts of 16 tokens, one a second being what can be served."""
    rng, now, arrivals = random.Random(4), 0.0, []
    for index in range(num_requests):
        now += rng.expovariate(load)
        due_s = None if first_token_s is None else now + first_token_s
        request = make_request(f"{index}", 16, 1, deadline_s=now + slo_s, first_token_due_s=due_s)
        arrivals.append((now, request))
    return arrivals


def test_overload_wastes_no_capacity_on_requests_that_come_too_late() -> None:
    load, num_requests = 1.5, 400
    with_abort = len(serve(make_stage(), overload(num_requests, load, slo_s=6.0)))
    without = len(serve(make_stage(), overload(num_requests, load, slo_s=6.0), False))
    print(f"attainment {with_abort / num_requests:.3f}, without {without / num_requests:.3f}")
    assert with_abort >= 0.9 * num_requests / load
    assert with_abort >= without


def test_a_bound_on_first_tokens_gives_up_what_waits_too_long_and_no_long_answer() -> None:
    load, num_requests, slo_s = 1.5, 400, 6.0
    served = []
    for first_token_s in (slo_s, None):
        stage = make_stage()
        arrivals = overload(num_requests, load, slo_s=1e6, first_token_s=first_token_s)
        serve(stage, arrivals)
        in_time = [
            request
            for when, request in arrivals
            if request.first_token_s is not None and request.first_token_s - when <= slo_s
        ]
        assert set(stage.reasons.values()) <= {INFEASIBLE}
        served.append(len(in_time))
    assert served[0] >= 0.9 * num_requests / load
    assert served[0] > 2 * served[1], "first come, first served has almost everybody late"
    patient = make_stage()
    patient.submit(make_request("long", 16, 40, first_token_due_s=slo_s))
    patient.run_dry()
    assert patient.finished == ["long"], "the bound is for the first token only"


PROMPTS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_nothing_is_lost_that_would_start_in_time(
    sizes: list[tuple[float, int, int]],
) -> None:
    """Each deadline leaves the slowest prefill seen after the start that a patient queue gives."""

    def arrivals(deadlines: dict[str, float]) -> list[tuple[float, Request]]:
        return [
            (when, make_request(f"{i}", num_prompt, out, deadline_s=deadlines.get(f"{i}")))
            for i, (when, num_prompt, out) in enumerate(sizes)
        ]

    patient = arrivals({})
    serve(make_stage(), patient)
    starts = {r.request_id: r.first_scheduled_s or 0.0 for _, r in patient}
    slowest = max((r.first_token_s or 0.0) - starts[r.request_id] for _, r in patient)
    pressed = arrivals({name: start + slowest + 4 * STEP_S for name, start in starts.items()})
    stage = make_stage()
    served = serve(stage, pressed)
    assert INFEASIBLE not in stage.reasons.values()
    assert served == {r.request_id for _, r in pressed}


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.floats(0.5, 12))
def test_work_that_has_begun_is_never_given_up_as_infeasible(
    sizes: list[tuple[float, int, int]], slo_s: float
) -> None:
    stage = make_stage()
    arrivals = [
        (when, make_request(f"{i}", num_prompt, out, deadline_s=when + slo_s))
        for i, (when, num_prompt, out) in enumerate(sizes)
    ]
    serve(stage, arrivals)
    for _, request in arrivals:
        if stage.reasons.get(request.request_id) == INFEASIBLE:
            assert request.first_scheduled_s is None and not request.output_ids
