"""Batches of several tenants under the fair order: bounds, latecomers, places kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_services.common.virtual_counters import (
    EXPECTED_BACK_S,
    INPUT_TOKEN_COST,
    OUTPUT_TOKEN_COST,
)
from tests.worker.scheduling.stage import Stage, make_request


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=80, max_size=80),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    share=st.sampled_from([2, 3, 9]),
)
def test_backlogged_tenants_stay_within_the_bound_of_their_counters(
    sizes: list[tuple[int, int]], weight: float, share: int
) -> None:
    """While both wait, what they received, by weight, differs by at most twice the larger of one
    prompt's cost and that of all outputs of a batch, whoever sends how much."""
    stage = Stage(200, (None,), prefix_cache=False, max_running=4)
    weights = {"a": weight, "b": 1.0}
    for index, (num_prompt, max_tokens) in enumerate(sizes):
        tenant = "b" if index % share else "a"
        stage.submit(
            make_request(
                f"{tenant}{index}",
                num_prompt,
                max_tokens,
                tenant=tenant,
                fairness_weight=weights[tenant],
            )
        )
    bound = 2 * max(30 * INPUT_TOKEN_COST, 4 * 12 * OUTPUT_TOKEN_COST) / min(weights.values())
    while {request.tenant for request in stage.scheduler.waiting} == {"a", "b"}:
        stage.step()
        served = stage.scheduler._tenants.accounts
        assert abs(served["a"].served - served["b"].served) <= bound


def test_a_tenant_that_comes_late_is_not_kept_waiting_by_a_flood() -> None:
    stage = Stage(200, (None,), max_running=2, max_step_tokens=8)
    stage.submit(*(make_request(f"flood{i}", 8, 4, tenant="flood") for i in range(40)))
    for _ in range(10):
        stage.step()
    stage.submit(make_request("late", 8, 4, tenant="late"))
    while "late" not in stage.finished:
        stage.step()
    assert stage.now <= 10 + 12


def test_the_last_slots_are_for_the_tenant_that_was_served_least() -> None:
    """It finds one at once in a batch that another keeps full; alone, a tenant has all of them."""
    bounds = {"max_running": 16, "max_step_tokens": 64}
    stage = Stage(400, (None,), prefix_cache=False, **bounds)
    stage.submit(*(make_request(f"flood{i}", 2, 20, tenant="flood") for i in range(60)))
    stage.step()
    assert stage.scheduler.num_running == 16
    stage.submit(make_request("late", 2, 4, tenant="late"))
    while "late" not in stage.finished:
        stage.step()
    for _ in range(4):
        stage.step()
    assert stage.scheduler.num_running == 14
    stage.submit(make_request("again", 2, 4, tenant="late"))
    assert "again" in [row.request.request_id for row in stage.step().rows]
    stage.scheduler.remove("again", stage.now)
    stage.now += EXPECTED_BACK_S
    stage.step()
    assert stage.scheduler.num_running == 16


def test_tenants_that_all_have_more_leave_no_slot_empty() -> None:
    bounds = {"max_running": 16, "max_step_tokens": 64}
    stage = Stage(400, (None,), prefix_cache=False, **bounds)
    stage.submit(*(make_request(f"{i}", 2, 5 + i % 7, tenant="ab"[i % 2]) for i in range(120)))
    while {request.tenant for request in stage.scheduler.waiting} == {"a", "b"}:
        assert len(stage.step().rows) == 16
