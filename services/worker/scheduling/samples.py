"""Recent durations, from which the scheduler predicts the next ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

NUM_SAMPLES = 256


class Samples:
    """The most recent durations, in seconds."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._num_samples = num_samples
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Add a measurement and drop the oldest."""
        self._in_order.append(seconds)
        insort(self._sorted, seconds)
        if len(self._in_order) > self._num_samples:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def quantile(self, share: float) -> float:
        """A quantile from 0 = the fastest to 1 = the slowest; 0 seconds before anything was
        measured."""
        if not self._sorted:
            return 0.0
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]


class SizedSamples:
    """The most recent durations of work of each size, to a factor of two."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        """`num_samples`: of each size."""
        self._num_samples = num_samples
        self._of_size: dict[int, Samples] = {}
        """By bit length of the size."""

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement of work of this size."""
        samples = self._of_size.setdefault(size.bit_length(), Samples(self._num_samples))
        samples.add(seconds)

    def quantile(self, size: int, share: float) -> float:
        """A quantile for work of about this size, or of the nearest smaller size that was measured;
        0 seconds if there is none."""
        known = [length for length in self._of_size if length <= size.bit_length()]
        return self._of_size[max(known)].quantile(share) if known else 0.0
