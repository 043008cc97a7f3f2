"""Hedges: a budget that holds, and a patience that follows what was measured."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.hedging import BUDGET_SHARE, MOST_SAVED, Hedging


@given(wants=st.lists(st.booleans(), max_size=2000))
def test_hedges_are_a_small_share_of_the_placements(wants: list[bool]) -> None:
    hedging, num_hedges = Hedging(), 0
    for number, wanted in enumerate(wants):
        hedging.begin()
        num_hedges += wanted and hedging.spend()
        assert num_hedges <= 1 + BUDGET_SHARE * (number + 1)


def test_a_quiet_time_saves_up_only_so_much() -> None:
    hedging = Hedging()
    for _ in range(100_000):
        hedging.begin()
    assert sum(hedging.spend() for _ in range(1000)) <= MOST_SAVED


def test_patience_settles_where_one_in_twenty_is_later() -> None:
    rng, hedging = random.Random(1), Hedging()
    for _ in range(5000):
        hedging.observe(rng.expovariate(1.0), 0.1)
    delay_s = hedging.delay_s(0.1)
    late = sum(rng.expovariate(1.0) > delay_s for _ in range(10_000)) / 10_000
    assert 0.02 < late < 0.1
