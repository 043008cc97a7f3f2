"""Quantiles of recent durations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.worker.scheduling.samples import NUM_SAMPLES, Samples, SizedSamples


@given(st.lists(st.floats(0, 100), min_size=1, max_size=3 * NUM_SAMPLES), st.floats(0, 1))
def test_quantiles_are_those_of_the_latest_samples(values: list[float], share: float) -> None:
    samples = Samples()
    for value in values:
        samples.add(value)
    latest = sorted(values[-NUM_SAMPLES:])
    assert samples.quantile(share) == latest[min(len(latest) - 1, int(share * len(latest)))]


def test_unmeasured_sizes_count_like_the_nearest_smaller_one() -> None:
    samples = SizedSamples()
    assert samples.quantile(100, 0.99) == 0.0
    samples.add(10, 1.0)
    samples.add(1000, 5.0)
    assert [samples.quantile(n, 0.99) for n in (1, 12, 100, 5000)] == [0.0, 1.0, 1.0, 5.0]
