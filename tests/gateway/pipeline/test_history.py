"""The history behind the console's charts: steps, rates, percentiles and what is forgotten."""

from __future__ import annotations

import pytest

from loraplex_services.gateway.pipeline.history import RANGES, LoadHistory


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_and_percentiles_belong_to_the_step_in_which_they_happened() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    for number in range(1, 101):
        history.first_token(number / 1000)
    history.generated(400)
    history.sample(7, 3)
    history.sample(2, 0)
    history.ended("", True, 50)
    history.ended("queue_full", False, 0)
    history.ended("", False, 5)
    clock.now_s = 1012.5
    first, second, last = history.points("5m")
    assert (first.generated_tokens_per_s, first.prompt_tokens_per_s) == (80.0, 11.0)
    assert (first.served_per_s, first.failed_per_s) == (0.2, 0.2), "a cancelled one is neither"
    assert (first.running, first.waiting) == (7, 3), "the most at once"
    assert first.first_token_p50_s == pytest.approx(0.050, rel=0.05)
    assert first.first_token_p95_s == pytest.approx(0.095, rel=0.05)
    assert (second.served_per_s, second.first_token_p50_s) == (0.0, None)
    assert [each.age_s for each in (first, second, last)] == [10.0, 5.0, 1.25]


def test_each_range_goes_as_far_back_as_it_says_and_no_further_than_the_start() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.ended("unavailable", False, 0)
    clock.now_s += 1800
    history.ended("", True, 1)
    counts = {name: len(history.points(name)) for name in RANGES}
    assert counts == {"5m": 60, "1h": 61, "6h": 11, "24h": 4}
    failures = {name: history.failures(name) for name in RANGES}
    assert failures["5m"] == []
    assert failures["1h"] == failures["24h"] == [("unavailable", 1)]
    clock.now_s += 90_000
    assert all(len(history.points(name)) == each.num_steps for name, each in RANGES.items())
    assert history.failures("24h") == []


def test_failures_are_listed_by_number_and_bounded_in_time() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    for number in range(3):
        for _ in range(number + 1):
            history.ended(f"reason_{number}", False, 0)
    assert history.failures("5m") == [("reason_2", 3), ("reason_1", 2), ("reason_0", 1)]


def test_a_step_that_has_just_begun_shows_no_absurd_rate() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    clock.now_s += 5.001
    history.ended("", True, 10)
    assert history.points("5m")[-1].prompt_tokens_per_s == 10.0
