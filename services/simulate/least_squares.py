"""Least squares with non-negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_OWN_PART = 3e-5
"""Part of a column, by length, that others must not make up for it to count as one of its own."""


def fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 for which sum((row * c - target)^2) is small.

    Solves without the bound, drops the most negative coefficient, and solves again until none is
    left; a column that is zero everywhere, or that others make up, gets 0.
    """
    matrix = np.array(rows, dtype=np.float64)
    lengths = np.linalg.norm(matrix, axis=0)
    units = matrix / np.where(lengths > 0, lengths, 1.0)
    kept: list[int] = []
    for column in range(matrix.shape[1]):
        if np.linalg.matrix_rank(units[:, [*kept, column]], tol=MIN_OWN_PART) > len(kept):
            kept.append(column)
    coefficients = np.zeros(matrix.shape[1])
    while kept:
        found = np.linalg.lstsq(units[:, kept], np.array(targets))[0] / lengths[kept]
        if found.min() >= 0:
            coefficients[kept] = found
            break
        del kept[int(found.argmin())]
    return [float(value) for value in coefficients]
