"""The sequential test: seeded trials of its error rates and of what it detects."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from loraplex.client.paired_test import MIN_PAIRS, Outcome, PairedTest

NUM_TRIALS = 200


def outcomes(draw: Callable[[random.Random], float], num_pairs: int) -> list[Outcome]:
    found = []
    for seed in range(NUM_TRIALS):
        source, test = random.Random(seed), PairedTest(margin=0.01)
        while test.num_pairs < num_pairs and test.outcome is Outcome.UNDECIDED:
            test.add(draw(source))
        found.append(test.outcome)
    return found


def changed(lost: float, won: float) -> Callable[[random.Random], float]:
    """Answers that were right and are wrong now, and the other way, as shares of all."""

    def draw(source: random.Random) -> float:
        value = source.random()
        return -1.0 if value < lost else float(value < lost + won)

    return draw


@pytest.mark.parametrize(
    "draw",
    [lambda source: source.gauss(-0.05, 0.1), changed(0.05, 0.0)],
    ids=["logprobs", "right-or-wrong"],
)
def test_a_regression_of_five_percent_is_found_within_five_hundred_pairs(
    draw: Callable[[random.Random], float],
) -> None:
    found = outcomes(draw, 500)
    assert found.count(Outcome.REJECTED) >= 0.96 * NUM_TRIALS
    assert Outcome.ACCEPTED not in found


@pytest.mark.parametrize(
    "draw",
    [
        lambda source: source.gauss(0.0, 0.1),
        changed(0.025, 0.025),
    ],
    ids=["logprobs", "right-or-wrong"],
)
def test_an_equal_version_is_not_rejected(draw: Callable[[random.Random], float]) -> None:
    assert outcomes(draw, 1000).count(Outcome.REJECTED) <= 0.01 * NUM_TRIALS


@pytest.mark.parametrize(
    "draw",
    [lambda source: source.gauss(-0.01, 0.1), changed(0.01, 0.0), changed(0.03, 0.02)],
    ids=["logprobs", "rare-losses", "losses-and-gains"],
)
def test_at_the_margin_itself_hardly_any_decision_falls(
    draw: Callable[[random.Random], float],
) -> None:
    found = outcomes(draw, 1000)
    assert found.count(Outcome.UNDECIDED) >= 0.97 * NUM_TRIALS


@pytest.mark.parametrize("difference", [-1e30, -math.inf, math.nan])
def test_what_is_not_a_finite_score_counts_as_the_worst(difference: float) -> None:
    test = PairedTest(margin=0.01)
    for _ in range(MIN_PAIRS):
        test.add(difference)
    assert test.outcome is Outcome.REJECTED
    assert (test.mean, test.standard_error) == (-1.0, 0.0)


def test_few_pairs_decide_nothing_however_large_the_difference() -> None:
    test = PairedTest(margin=0.01)
    for _ in range(MIN_PAIRS - 1):
        test.add(-1.0)
        assert test.outcome is Outcome.UNDECIDED
    test.add(-1.0)
    assert test.outcome is Outcome.REJECTED


def test_pairs_that_never_differ_are_accepted_in_the_end() -> None:
    test = PairedTest(margin=0.01)
    while test.outcome is Outcome.UNDECIDED:
        test.add(0.0)
    assert test.outcome is Outcome.ACCEPTED and 463 < test.num_pairs < 600
