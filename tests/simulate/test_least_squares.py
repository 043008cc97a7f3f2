"""Least squares: exact where it can be, never negative."""

from __future__ import annotations

import random

import pytest

from loraplex_services.simulate.least_squares import fit


def test_exact_data_gives_its_coefficients_back() -> None:
    rng = random.Random(0)
    rows = [[1.0, rng.uniform(0, 1e6), rng.uniform(0, 10)] for _ in range(40)]
    truth = [0.003, 2e-9, 0.5]
    targets = [sum(c * x for c, x in zip(truth, row, strict=True)) for row in rows]
    assert fit(rows, targets) == pytest.approx(truth, rel=1e-6)


def test_a_coefficient_that_would_be_negative_becomes_zero() -> None:
    rows = [[1.0, float(x)] for x in range(10)]
    intercept, slope = fit(rows, [10.0 - x for x in range(10)])
    assert slope == 0.0
    assert intercept == pytest.approx(5.5)


def test_a_column_of_zeros_or_a_copy_of_another_gets_zero() -> None:
    rows = [[float(x), 0.0, float(x)] for x in range(1, 10)]
    first, empty, copy = fit(rows, [2.0 * x for x in range(1, 10)])
    assert (first, empty, copy) == pytest.approx((2.0, 0.0, 0.0))
