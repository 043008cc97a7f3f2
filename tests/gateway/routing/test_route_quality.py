"""The real routing functions in a simulated fleet: requests go where their adapters are."""

from __future__ import annotations

import pytest

from benchmarks.scheduling.routing import (
    at_random,
    by_router,
    fewest_misses,
    ideal,
    oracle,
    popularity,
    round_robin,
    simulate,
)

NUM_REQUESTS = 3000


def test_adapters_that_fit_are_nearly_always_where_their_requests_go() -> None:
    found = simulate(by_router, popularity(20, 1.0), NUM_REQUESTS, seed=1)
    assert found.holder_share >= 0.95


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_twice_as_many_adapters_as_slots(exponent: float) -> None:
    weights = popularity(64, exponent)
    routed = simulate(by_router, weights, NUM_REQUESTS, seed=1)
    drawn = simulate(at_random(1), weights, NUM_REQUESTS, seed=1)
    assert routed.holder_share >= 0.84 * ideal(weights)
    gap = ideal(weights) - drawn.holder_share
    assert routed.holder_share >= drawn.holder_share + 0.5 * gap


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_tail_of_first_tokens_is_half_of_that_of_round_robin(exponent: float) -> None:
    weights = popularity(64, exponent)
    routed = simulate(by_router, weights, NUM_REQUESTS, seed=1)
    turns = simulate(round_robin(), weights, NUM_REQUESTS, seed=1)
    assert routed.p99_s <= 0.5 * turns.p99_s


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_workers_that_keep_what_is_used_often_come_near_the_best(exponent: float) -> None:
    weights = popularity(64, exponent)
    last, often = (
        simulate(by_router, weights, NUM_REQUESTS, seed=1, keeps_popular=keeps)
        for keeps in (False, True)
    )
    assert often.holder_share >= last.holder_share + 0.03
    assert often.holder_share >= 0.91 * ideal(weights)
    assert often.p99_s <= last.p99_s


def test_what_an_oracle_could_do_bounds_what_the_router_does() -> None:
    weights = popularity(64, 1.0)
    found = simulate(by_router, weights, NUM_REQUESTS, seed=1, keeps_popular=True)
    assert ideal(weights) < oracle(weights, NUM_REQUESTS, seed=1) < 0.95
    assert found.holder_share < oracle(weights, NUM_REQUESTS, seed=1)


def test_the_oracle_drops_what_is_asked_for_last() -> None:
    """By hand: 2 goes when 4 comes, and what never comes again is not kept."""
    assert fewest_misses([1, 2, 3, 1, 4, 1, 4, 3, 2], num_slots=3) == 5
    assert fewest_misses([1, 2, 3, 1, 4, 1, 3, 2], num_slots=3) == 4
