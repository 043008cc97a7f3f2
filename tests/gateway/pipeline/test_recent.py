"""The last minute: what is counted, forgotten and ranked."""

from __future__ import annotations

import gc
import sys

import pytest

from loraplex_services.gateway.pipeline.recent import MAX_MODELS, WINDOW_S, RecentRequests


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_percentiles_and_failures_of_the_window() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    clock.now_s = 10.0
    for number in range(1, 101):
        recent.first_token(number / 1000)
        recent.ended("ok", "a", prompt_tokens=2, generated_tokens=3, duration_s=number / 100)
    recent.ended("queue_full")
    recent.ended("cancelled", "a", generated_tokens=1, duration_s=99.0)
    load = recent.load()
    assert (load.window_s, load.requests, load.failures) == (10.0, 102, {"queue_full": 1})
    assert (load.prompt_tokens, load.generated_tokens) == (200, 301)
    assert load.first_token_p50_s == pytest.approx(0.05)
    assert load.first_token_p95_s == pytest.approx(0.095)
    assert load.duration_p95_s == pytest.approx(0.95), "of those that were served"


def test_what_is_older_is_forgotten() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    recent.ended("ok", "a", generated_tokens=3)
    recent.first_token(1.0)
    clock.now_s = WINDOW_S + 1.0
    recent.ended("unavailable", "b")
    load = recent.load()
    assert (load.window_s, load.requests, load.first_token_p50_s) == (WINDOW_S, 1, 0.0)
    assert [(each.model, each.errors) for each in load.models] == [("b", 1)]


def test_what_is_older_is_forgotten_though_nobody_asks_for_the_load() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(20_000):
        clock.now_s = WINDOW_S * number / 100
        recent.first_token(1.0)
        recent.ended("ok", "a", duration_s=1.0)
    gc.collect()
    assert sys.getallocatedblocks() - before < 10_000


def test_models_are_bounded_and_ranked_by_tokens() -> None:
    recent = RecentRequests(Clock())
    for number in range(MAX_MODELS + 20):
        recent.ended("ok", f"m{number}", generated_tokens=number)
    models = recent.load().models
    assert len(models) == MAX_MODELS
    assert [each.model for each in models[:2]] == [f"m{MAX_MODELS + 19}", f"m{MAX_MODELS + 18}"]
