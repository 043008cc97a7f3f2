"""Whole gateways in overload, in virtual time: who is let in is done in time, nobody is starved."""

from __future__ import annotations

import pytest

from benchmarks.scheduling.overload import capacity, fairness, overload

SECONDS = 4.0


@pytest.fixture(scope="module")
def per_s() -> float:
    """What the fleet can serve."""
    return capacity(SECONDS)


def test_twice_what_can_be_served(per_s: float) -> None:
    found = overload(1, SECONDS, per_s)
    assert found.offered_over_capacity > 1.7
    assert found.goodput_over_capacity >= 0.9
    assert found.accepted_in_time >= 0.99
    assert found.refusals_over_excess <= 1.1


def test_a_fleet_that_was_never_loaded_is_not_drowned_by_its_first_flood(per_s: float) -> None:
    """Nothing is known of times when it begins: who is let in is done in time all the same."""
    found = overload(1, SECONDS, per_s, warm_up_s=0.0)
    assert found.goodput_over_capacity >= 0.9
    assert found.accepted_in_time >= 0.99


@pytest.mark.long
def test_ten_times_its_share_does_a_greedy_tenant_no_good(per_s: float) -> None:
    assert fairness(1, 3 * SECONDS, per_s).ratio <= 1.1
