"""Metrics of a run, against values worked out by hand."""

from __future__ import annotations

import pytest

from loraplex.workload.metrics import RequestOutcome, percentiles, summarize

FAST = RequestOutcome(arrival_s=0.0, first_token_s=3.0, end_s=5.0, num_output=5, finished=True)
LATE = RequestOutcome(arrival_s=1.0, first_token_s=8.0, end_s=10.0, num_output=1, finished=True)
ABORTED = RequestOutcome(2.0, 2.5, 4.0, num_output=3, finished=False, reason="DEADLINE_EXCEEDED")


def test_attainment_and_satisfaction_count_late_and_aborted_requests_as_zero() -> None:
    summary = summarize([FAST, LATE, ABORTED])
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.satisfaction == pytest.approx((1 - 9 / 36) / 3)


def test_throughput_counts_finished_requests_only() -> None:
    summary = summarize([FAST, LATE, ABORTED])
    assert (summary.num_requests, summary.num_finished) == (3, 2)
    assert summary.requests_per_s == pytest.approx(2 / 10)
    assert summary.output_tokens_per_s == pytest.approx(6 / 10)


def test_latencies_are_those_of_finished_requests() -> None:
    summary = summarize([FAST, LATE, ABORTED])
    assert (summary.first_token.p50_s, summary.first_token.p99_s) == (3.0, 7.0)
    assert summary.per_token.p50_s == pytest.approx(0.5)
    assert summary.latency.mean_s == pytest.approx((5 + 9) / 2)


def test_time_outside_the_engine_is_what_the_worker_does_not_account_for() -> None:
    known = RequestOutcome(1.0, 3.0, 5.0, num_output=5, finished=True, engine_s=1.5)
    assert summarize([known, FAST]).outside.mean_s == pytest.approx(0.5)


def test_percentiles_are_nearest_rank() -> None:
    result = percentiles(float(value) for value in range(100, 0, -1))
    assert (result.p50_s, result.p90_s, result.p99_s) == (50.0, 90.0, 99.0)


def test_a_run_in_which_nothing_finished_has_numbers_too() -> None:
    summary = summarize([ABORTED])
    assert summary.requests_per_s == summary.satisfaction == summary.first_token.p99_s == 0.0
    assert summary.failures == {"DEADLINE_EXCEEDED": 1}
