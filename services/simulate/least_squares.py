"""Least squares with non-negative coefficients, for small dense problems. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]


def fit(rows: Sequence[Row], targets: Sequence[float]) -> list[float]:
    """Coefficients c >= 0 for which sum((row * c - target)^2) is small.

    Solves without the bound, drops the most negative coefficient, and solves again until none is
    left; a column that is zero everywhere, or that others make up, gets 0.
    """
    width = len(rows[0])
    gram = [[math.fsum(r[i] * r[j] for r in rows) for j in range(width)] for i in range(width)]
    right = [
        math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True))
        for i in range(width)
    ]
    kept = [i for i in range(width) if gram[i][i] > 0]
    while kept:
        found = _solve([[gram[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        lowest = min(range(len(kept)), key=found.__getitem__)
        if found[lowest] >= 0:
            break
        del kept[lowest]
    coefficients = [0.0] * width
    for index, value in zip(kept, found if kept else (), strict=True):
        coefficients[index] = value
    return coefficients


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss-Jordan on the matrix scaled to a unit diagonal; dependent columns get 0."""
    scale = [math.sqrt(matrix[i][i]) for i in range(len(right))]
    size = range(len(right))
    table = [
        [*(matrix[i][j] / (scale[i] * scale[j]) for j in size), right[i] / scale[i]] for i in size
    ]
    solved: list[int] = []
    for column in size:
        pivot = table[column][column]
        if abs(pivot) < 1e-9:
            continue
        solved.append(column)
        table[column] = [value / pivot for value in table[column]]
        for other in size:
            if other != column:
                factor = table[other][column]
                table[other] = [
                    a - factor * b for a, b in zip(table[other], table[column], strict=True)
                ]
    return [table[i][-1] / scale[i] if i in solved else 0.0 for i in size]
