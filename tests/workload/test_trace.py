"""Traces: reproducible, and of the distributions they claim."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.errors import InvalidRequest
from loraplex.workload import (
    RANK_MIXES,
    Arrivals,
    LogNormalLengths,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
)

LONG = Workload(num_adapters=100, rate_per_s=10, duration_s=2000)
POOLED = replace(LONG, arrivals=Arrivals.POOLED)


def gaps_of(workload: Workload) -> list[float]:
    arrivals = [0.0, *(request.arrival_s for request in generate(workload))]
    return [b - a for a, b in itertools.pairwise(arrivals)]


def test_equal_workloads_give_equal_traces_and_another_seed_another_one() -> None:
    assert generate(LONG) == generate(LONG)
    assert generate(LONG) != generate(replace(LONG, seed=1))


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_of_one_process_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = gaps_of(replace(POOLED, cv=cv))
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("cv", [0.5, pytest.param(1.0, marks=pytest.mark.long), 3.0])
def test_each_adapter_has_a_process_of_its_rate_and_the_variation_asked_for(cv: float) -> None:
    workload = Workload(5, rate_per_s=10, duration_s=20_000, cv=cv, alpha=0.5)
    arrivals: dict[int | None, list[float]] = {}
    for request in generate(workload):
        arrivals.setdefault(request.adapter, []).append(request.arrival_s)
    for adapter in range(5):
        gaps = [b - a for a, b in itertools.pairwise(arrivals[adapter])]
        assert 1 / statistics.fmean(gaps) == pytest.approx(workload.adapter_rate(adapter), rel=0.1)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_bursts_change_the_number_of_requests_of_a_trace_but_not_its_mean(cv: float) -> None:
    short = Workload(20, rate_per_s=4, duration_s=25, cv=cv, alpha=0.5)
    counts = [len(generate(replace(short, seed=seed))) for seed in range(300)]
    assert statistics.fmean(counts) == pytest.approx(100, rel=0.12)


@settings(max_examples=25, deadline=None)
@given(
    num_adapters=st.integers(1, 50),
    rate_per_s=st.floats(0.5, 20),
    cv=st.floats(0.2, 8),
    alpha=st.floats(0.05, 3),
    arrivals=st.sampled_from(Arrivals),
)
def test_traces_are_in_order_and_the_power_law_divides_the_whole_rate(
    num_adapters: int, rate_per_s: float, cv: float, alpha: float, arrivals: Arrivals
) -> None:
    workload = Workload(num_adapters, rate_per_s, 60.0, cv, alpha, arrivals=arrivals)
    rates = [workload.adapter_rate(index) for index in range(num_adapters)]
    assert sum(rates) == pytest.approx(rate_per_s)
    assert sorted(rates, reverse=alpha < 1) == pytest.approx(rates)
    try:
        trace = generate(workload)
    except InvalidRequest as error:
        assert "no request" in error.message
        return
    times = [request.arrival_s for request in trace]
    assert times == sorted(times) and {r.adapter for r in trace} <= set(range(num_adapters))
    if arrivals is Arrivals.PER_ADAPTER:
        assert times[-1] < 60.0


def test_a_workload_without_a_single_request_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--rate"):
        generate(Workload(1, rate_per_s=1e-9, duration_s=1))


def test_an_exponent_of_one_is_uniform_and_a_smaller_one_prefers_the_first_adapters() -> None:
    def share_of_first_tenth(alpha: float) -> float:
        trace = generate(replace(LONG, alpha=alpha))
        return sum(r.adapter is not None and r.adapter < 10 for r in trace) / len(trace)

    assert share_of_first_tenth(1.0) == pytest.approx(0.1, abs=0.01)
    assert share_of_first_tenth(0.5) == pytest.approx(0.1**0.5, abs=0.02)


def test_every_adapter_and_length_is_in_range_and_the_ends_occur() -> None:
    lengths = UniformLengths((8, 12), (1, 3))
    trace = generate(replace(LONG, num_adapters=7, lengths=lengths))
    assert {r.adapter for r in trace} == set(range(7))
    assert {r.num_input for r in trace} == set(range(8, 13))
    assert {r.num_output for r in trace} == {1, 2, 3}


def test_changing_the_exponent_keeps_arrivals_and_lengths() -> None:
    plain, skewed = generate(POOLED), generate(replace(POOLED, alpha=0.2))
    assert [(r.arrival_s, r.num_input) for r in plain] == [
        (r.arrival_s, r.num_input) for r in skewed
    ]


def test_no_adapters_means_the_bare_base() -> None:
    assert {r.adapter for r in generate(replace(LONG, num_adapters=0))} == {None}


def test_heavy_tailed_lengths_have_their_means_and_end_at_the_cap() -> None:
    trace = generate(Workload(26, rate_per_s=10, duration_s=3000, lengths=LogNormalLengths()))
    assert statistics.fmean(r.num_input for r in trace) == pytest.approx(85, rel=0.08)
    assert statistics.fmean(r.num_output for r in trace) == pytest.approx(165, rel=0.08)
    assert max(r.num_output for r in trace) <= LogNormalLengths().cap


def test_ranks_are_dealt_in_rotation() -> None:
    assert ranks_of(RANK_MIXES["S2"], 6) == [64, 32, 16, 8, 64, 32]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate_per_s", 0.0), ("cv", -1.0), ("alpha", float("nan")), ("duration_s", float("inf"))],
)
def test_impossible_parameters_are_refused_by_their_flags(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"--{field.partition('_')[0]}:"):
        replace(LONG, **{field: value})


def test_a_range_of_lengths_from_high_to_low_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="outputs"):
        UniformLengths(outputs=(9, 8))
