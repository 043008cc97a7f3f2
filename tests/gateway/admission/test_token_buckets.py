"""Shared token buckets: whatever gateways do, they overshoot by their leases at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.gateway.admission.token_buckets import Bucket, Lease, capacity_of

RATES = st.floats(0.5, 1000)


def _spend(bucket: Bucket, lease: Lease, amount: float, rate: float, now_s: float) -> bool:
    """One request of one gateway, as `Rates` does it."""
    missing = lease.take(amount, rate, now_s)
    if missing > 0:
        grant = bucket.ask(rate, missing, lease.wish(missing, rate), 0.0, now_s)
        if not grant.amount:
            lease.put(amount - missing, rate)
            assert grant.wait_s > 0
            return False
        lease.put(grant.amount - missing, rate)
    lease.count(amount)
    return True


@given(
    rate=RATES,
    num_gateways=st.integers(1, 4),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.01, 1.0), st.floats(0.0, 0.7)), max_size=120
    ),
)
def test_spending_in_any_window_is_bounded(
    rate: float, num_gateways: int, requests: list[tuple[int, float, float]]
) -> None:
    """Costs up to a full bucket; gaps of 0 to 0.7 s."""
    capacity = capacity_of(rate)
    bucket, leases = Bucket(capacity, 0.0), [Lease() for _ in range(num_gateways)]
    spent: list[tuple[float, float]] = []
    now_s = 0.0
    for gateway, cost, gap_s in requests:
        now_s += gap_s
        amount = cost * capacity
        if _spend(bucket, leases[gateway % num_gateways], amount, rate, now_s):
            spent.append((now_s, amount))
        assert all(0 <= lease.held <= capacity + 1e-9 for lease in leases)
    for start, (start_s, _) in enumerate(spent):
        total = 0.0
        for end_s, amount in spent[start:]:
            total += amount
            bound = rate * (end_s - start_s) + capacity + num_gateways * capacity
            assert total <= bound * (1 + 1e-9)


@given(rate=RATES)
def test_steady_demand_under_the_rate_is_never_refused(rate: float) -> None:
    bucket, leases = Bucket(capacity_of(rate), 0.0), [Lease(), Lease()]
    gap_s = 1.1 / rate
    for number in range(200):
        assert _spend(bucket, leases[0], 1.0, rate, number * gap_s)


def test_demand_over_the_rate_gets_the_rate() -> None:
    bucket, lease, rate = Bucket(10.0, 0.0), Lease(), 10.0
    paid = sum(_spend(bucket, lease, 1.0, rate, step * 0.01) for step in range(10_000))
    assert rate * 100 <= paid <= rate * 100 + 2 * capacity_of(rate)


def test_request_larger_than_the_bucket_waits_for_a_full_one_and_leaves_debt() -> None:
    bucket = Bucket(10.0, 0.0)
    assert bucket.ask(10.0, 35.0, 0.0, 0.0, 0.0).amount == 35.0
    assert bucket.ask(10.0, 1.0, 0.0, 0.0, 0.0).wait_s == pytest.approx(2.6)
    assert bucket.ask(10.0, 1.0, 0.0, 0.0, 2.61).amount == 1.0


def test_returned_units_can_be_granted_again() -> None:
    bucket = Bucket(10.0, 0.0)
    assert bucket.ask(10.0, 10.0, 0.0, 0.0, 0.0).amount == 10.0
    assert bucket.ask(10.0, 4.0, 0.0, 4.0, 0.0).amount == 4.0


def test_what_is_too_much_to_keep_is_said() -> None:
    lease = Lease()
    assert lease.put(25.0, rate=10.0) == 15.0
    assert lease.held == 10.0
