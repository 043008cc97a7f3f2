"""The history of a gateway's load: steps, rates, percentiles, and what is forgotten."""

from __future__ import annotations

import gc
import sys

import pytest

from loraplex_services.gateway.pipeline.history import MAX_MODELS, RANGES, LoadHistory


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
    history.ended("ok", "a", prompt_tokens=50)
    history.ended("queue_full")
    history.ended("cancelled", "a", prompt_tokens=5)
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
    history.ended("unavailable")
    clock.now_s += 1800
    history.ended("ok", "a", prompt_tokens=1)
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
            history.ended(f"reason_{number}")
    assert history.failures("5m") == [("reason_2", 3), ("reason_1", 2), ("reason_0", 1)]


def test_a_step_that_has_just_begun_shows_no_absurd_rate() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    clock.now_s += 5.001
    history.ended("ok", "a", prompt_tokens=10)
    assert history.points("5m")[-1].prompt_tokens_per_s == 10.0


def test_the_last_minute_has_rates_percentiles_and_failures() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    clock.now_s += 10.0
    for number in range(1, 101):
        history.first_token(number / 1000)
        history.ended("ok", "a", prompt_tokens=2, generated_tokens=3, duration_s=number / 100)
    history.ended("queue_full")
    history.ended("cancelled", "a", generated_tokens=1, duration_s=99.0)
    load = history.last_minute()
    assert (load.window_s, load.requests, load.failures) == (10.0, 102, {"queue_full": 1})
    assert (load.prompt_tokens, load.generated_tokens) == (200, 301)
    assert load.first_token_p50_s == pytest.approx(0.05, rel=0.05)
    assert load.first_token_p95_s == pytest.approx(0.095, rel=0.05)
    assert load.duration_p95_s == pytest.approx(0.95, rel=0.05), "of those that were served"


def test_the_last_minute_has_nothing_that_is_older() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.ended("ok", "a", generated_tokens=3)
    history.first_token(1.0)
    clock.now_s += 61.0
    history.ended("unavailable", "b")
    load = history.last_minute()
    assert (load.window_s, load.requests, load.first_token_p50_s) == (56.0, 1, 0.0)
    assert [(each.model, each.errors) for each in load.models] == [("b", 1)]


def test_names_of_models_are_forgotten_though_nobody_asks_for_the_load() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(20_000):
        clock.now_s += 0.6
        history.ended("ok", f"model-{number}", duration_s=1.0)
    gc.collect()
    assert sys.getallocatedblocks() - before < 10_000


def test_models_of_the_last_minute_are_bounded_and_ranked_by_tokens() -> None:
    history = LoadHistory(Clock())
    for number in range(MAX_MODELS + 20):
        history.ended("ok", f"m{number}", generated_tokens=number)
    models = history.last_minute().models
    assert len(models) == MAX_MODELS
    assert [each.model for each in models[:2]] == [f"m{MAX_MODELS + 19}", f"m{MAX_MODELS + 18}"]


def test_models_of_a_tenant_are_listed_however_busy_those_of_others_are() -> None:
    history = LoadHistory(Clock())
    for number in range(MAX_MODELS + 20):
        history.ended("ok", f"busy/m{number}", generated_tokens=100)
    for model in ("acme/a", "acme-2/a", "base"):
        history.ended("ok", model, generated_tokens=1)
    assert [each.model for each in history.last_minute("acme").models] == ["acme/a"]
    assert history.last_minute("acme").requests == MAX_MODELS + 23
