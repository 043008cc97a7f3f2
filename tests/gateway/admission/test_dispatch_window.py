"""The dispatch window: free batch slots, a few steps of work, a part for every tenant."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.gateway.admission.dispatch_window import (
    MAX_TOKENS_PER_WORKER,
    MIN_TOKENS_PER_WORKER,
    DispatchWindow,
    InFlightTokens,
    ReadyWorkers,
    Window,
)


def _settled(tokens_per_step: float, step_s: float, num_workers: int = 1) -> float:
    """The room after steps that each start what there is room for, up to what they can."""
    window, workers, now_s = DispatchWindow(), ReadyWorkers(num_workers, step_s), 0.0
    window.begin(now_s)
    for _ in range(300):
        now_s += step_s
        started = min(tokens_per_step, window.window(workers).num_tokens)
        window.started(int(started), now_s, workers)
    return window.window(workers).num_tokens


def test_at_first_the_window_admits_what_fits_the_batches_and_little_more() -> None:
    window = DispatchWindow().window(ReadyWorkers(2, batch_capacity=64))
    most = 2 * MAX_TOKENS_PER_WORKER
    assert window == Window(2 * MIN_TOKENS_PER_WORKER, 64, most, most)


def test_batches_are_filled_as_fast_as_prompts_can_be_computed() -> None:
    slow, quick = (ReadyWorkers(1, 0.1, 32, per_s) for per_s in (2000.0, 50_000.0))
    assert DispatchWindow().window(slow).max_tokens == pytest.approx(600)
    assert DispatchWindow().window(quick).max_tokens == MAX_TOKENS_PER_WORKER


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.5, 3.0])
def test_window_holds_what_few_steps_start(step_s: float) -> None:
    """It follows the workers and does not shrink on its own account where steps are long."""
    assert 2000 <= _settled(1000.0, step_s) <= 12_000
    assert _settled(3000.0, step_s) >= 6000


def test_workers_that_start_little_get_the_least() -> None:
    assert _settled(1.0, 0.02, num_workers=3) == 3 * MIN_TOKENS_PER_WORKER


def test_request_that_fits_the_batch_is_sent_whatever_is_in_flight() -> None:
    ahead, window = InFlightTokens(), Window(256.0, 32, 8192.0)
    ahead.add(1, "a", 256)
    assert not ahead.fit("a", 128, window, fits_batch=False)
    assert ahead.fit("a", 128, window, fits_batch=True)
    ahead.add(2, "a", 7900)
    assert not ahead.fit("a", 128, window, fits_batch=True)


def test_a_tenant_passes_those_who_filled_the_window_and_may_fill_one_itself() -> None:
    ahead, window = InFlightTokens(), Window(256.0)
    ahead.add(1, "greedy", 256)
    assert not ahead.fit("greedy", 128, window, fits_batch=False)
    for number in (2, 3):
        assert ahead.fit("polite", 128, window, fits_batch=False)
        ahead.add(number, "polite", 128)
    assert not ahead.fit("polite", 128, window, fits_batch=False)
    assert ahead.fit("third", 300, window, fits_batch=False)


@given(
    seed=st.integers(0, 10_000),
    window=st.integers(1, 3000),
    moves=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 2000)), max_size=80),
)
def test_a_tenant_fills_one_window_whatever_others_do(
    seed: int, window: int, moves: list[tuple[str, int]]
) -> None:
    """But for its first request, which may be larger by itself."""
    rng, ahead, sent = random.Random(seed), InFlightTokens(), dict[int, tuple[str, int]]()
    for number, (tenant, tokens) in enumerate(moves):
        if sent and rng.random() < 0.4:
            gone = rng.choice(list(sent))
            del sent[gone]
            assert ahead.remove(gone)
            assert not ahead.remove(gone)
        if ahead.fit(tenant, tokens, Window(window), fits_batch=False):
            ahead.add(number, tenant, tokens)
            sent[number] = tenant, tokens
        by_tenant, largest = Counter[str](), Counter[str]()
        for name, each in sent.values():
            by_tenant[name] += each
            largest[name] = max(largest[name], each)
        assert all(total <= max(window, largest[name]) for name, total in by_tenant.items())
