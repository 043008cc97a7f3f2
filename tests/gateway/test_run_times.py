"""How long a request will run, from those that ran."""

from __future__ import annotations

import random

import pytest

from services.gateway.run_times import RunTimes


def test_before_anything_was_seen_only_what_a_request_insists_on_is_counted() -> None:
    times = RunTimes()
    assert times.run_s(0, 4000, step_s=0.0) == 0.0
    assert times.run_s(0, 4000, step_s=0.1) == 0.0
    assert times.run_s(24, 24, step_s=0.1) == pytest.approx(2.4)


def test_answers_of_one_length_are_foretold_with_a_margin_only() -> None:
    times = RunTimes()
    for _ in range(50):
        times.observe_pace(0.2, 0.1)
        times.observe_length(24)
    assert times.run_s(0, 4000, step_s=9.0) == pytest.approx(1.15 * 2.6)
    assert times.run_s(0, 8, step_s=9.0) == pytest.approx(1.15 * 1.0)
    assert times.run_s(40, 4000, step_s=9.0) == pytest.approx(1.15 * 4.2)


def test_most_answers_of_uneven_length_are_done_in_the_time_foretold() -> None:
    rng, times = random.Random(0), RunTimes()
    done = []
    for _ in range(4000):
        length = min(1 + rng.expovariate(1 / 100), 1000)
        done.append(0.1 * length <= times.run_s(0, 1000, step_s=0.1))
        times.observe_pace(0.0, 0.1)
        times.observe_length(length)
    assert sum(done) / len(done) > 0.9
