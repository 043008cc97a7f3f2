"""Stopwatch, medians and 99th percentiles."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """A list that holds the seconds once the block has ended."""
    elapsed: list[float] = []
    begin_s = time.perf_counter()
    yield elapsed
    elapsed.append(time.perf_counter() - begin_s)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of what was measured alternately."""
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; nan of nothing."""
    if not values:
        return float("nan")
    return sorted(values)[int(0.99 * len(values))]
