"""The learnt limit: falls when tokens come slower, grows back, keeps its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.adaptive import GradientLimit, updated


def _after(limit: GradientLimit, sample_s: float, in_flight: int, count: int) -> GradientLimit:
    for _ in range(count):
        limit = updated(limit, sample_s, min(in_flight, limit.whole))
    return limit


def test_steady_latency_keeps_the_limit_open() -> None:
    assert _after(GradientLimit.starting(16, 512), 0.02, 400, 500).whole == 512


def test_slow_tokens_lower_the_limit_and_fast_ones_raise_it_again() -> None:
    steady = _after(GradientLimit.starting(16, 512), 0.02, 400, 300)
    slowed = _after(steady, 0.2, 400, 60)
    assert slowed.whole < 200
    assert _after(slowed, 0.02, 400, 700).whole > 400


def test_idle_gateway_learns_nothing_that_lowers_it() -> None:
    steady = _after(GradientLimit.starting(16, 512), 0.02, 400, 300)
    assert _after(steady, 0.2, 3, 60).whole >= 16


@given(
    samples=st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 10_000)), max_size=200),
    least=st.integers(1, 50),
    room=st.integers(0, 500),
)
def test_limit_stays_within_its_bounds(
    samples: list[tuple[float, int]], least: int, room: int
) -> None:
    limit = GradientLimit.starting(least, least + room)
    for sample_s, in_flight in samples:
        limit = updated(limit, sample_s, in_flight)
        assert least <= limit.whole <= least + room
