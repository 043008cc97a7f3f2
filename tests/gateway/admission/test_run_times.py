"""How long a request will run, from those that ran."""

from __future__ import annotations

import random

import pytest

from loraplex_services.gateway.admission.run_times import RequestLatency, RunTimeEstimator


def test_before_anything_was_seen_only_what_a_request_insists_on_is_counted() -> None:
    times = RunTimeEstimator()
    assert times.run_s(0, 4000, step_s=0.0) == 0.0
    assert times.run_s(0, 4000, step_s=0.1) == 0.0
    assert times.run_s(24, 24, step_s=0.1) == pytest.approx(1.15 * 2.4)


def test_times_of_equal_answers_are_predicted_exactly() -> None:
    times = RunTimeEstimator()
    for _ in range(300):
        times.observe_latency(RequestLatency(0.2, 0.1), 24, times.latency)
        times.observe_length(24)
    assert times.run_s(0, 4000, step_s=9.0) == pytest.approx(2.6, rel=0.01)
    assert times.run_s(0, 8, step_s=9.0) == pytest.approx(1.0, rel=0.01)
    assert times.run_s(40, 4000, step_s=9.0) == pytest.approx(4.2, rel=0.01)


def test_most_answers_of_uneven_length_and_speed_end_within_the_predicted_time() -> None:
    rng, times = random.Random(0), RunTimeEstimator()
    done, paced = [], []
    for _ in range(4000):
        length, token_s = min(1 + rng.expovariate(1 / 100), 1000), rng.gauss(0.1, 0.01)
        done.append(token_s * length <= times.run_s(0, 1000, step_s=0.1))
        paced.append(token_s * 50 <= times.run_s(50, 50, step_s=0.1))
        times.observe_latency(RequestLatency(0.0, token_s), length, times.latency)
        times.observe_length(length)
    assert sum(done) / len(done) > 0.9
    assert sum(paced) / len(paced) > 0.97


def test_a_pace_that_changes_while_requests_run_widens_the_margin() -> None:
    times = RunTimeEstimator()
    for number in range(400):
        predicted = times.latency
        for _ in range(5):
            times.observe_latency(RequestLatency(0.0, 0.1 + 0.02 * (number % 2)), 24, predicted)
    assert times.run_s(24, 24, step_s=0.0) > 1.15 * times.latency.run_s(24)
