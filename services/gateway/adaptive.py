"""How many requests may run at once, learnt from how long they take. Pure.

A gradient compares the latency of now with that of the long run and moves the limit by their
ratio. Latency is normalised, in seconds per token: a long answer is not a slow one.

Source: the Gradient2 limit of Netflix's concurrency-limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_LONG_SAMPLES = 600.0
_WARM_UP_SAMPLES = 10
_TOLERANCE = 1.5
"""Latency may be this multiple of the long-run mean before the limit falls."""
_SMOOTHING = 0.2
_MAX_DRIFT = 2.0
"""A long-run mean beyond this multiple of the present one belongs to times that are over."""
_HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class GradientLimit:
    """A limit on concurrency and what it has learnt."""

    least: int
    most: int
    limit: float
    long_s: float = 0.0
    """Long-run mean of the normalised latency, in seconds per token."""
    num_samples: int = 0

    @classmethod
    def starting(cls, least: int, most: int) -> GradientLimit:
        """Wide open until latencies say otherwise."""
        assert 0 < least <= most, f"bad bounds {least}..{most}"
        return cls(least, most, float(most))

    @property
    def whole(self) -> int:
        """The limit as a number of sequences."""
        return math.floor(self.limit)


def updated(limit: GradientLimit, sample_s: float, in_flight: int) -> GradientLimit:
    """The limit after a request that took `sample_s` per token while `in_flight` ran."""
    count = limit.num_samples + 1
    weight = 1.0 / count if count <= _WARM_UP_SAMPLES else 2.0 / (_LONG_SAMPLES + 1.0)
    long_s = limit.long_s + weight * (sample_s - limit.long_s)
    if long_s > _MAX_DRIFT * sample_s:
        long_s *= 0.95
    learnt = replace(limit, long_s=long_s, num_samples=count)
    is_short_of_work = in_flight < limit.limit / 2 and limit.limit < limit.most
    if count <= _WARM_UP_SAMPLES or is_short_of_work or sample_s <= 0:
        return learnt
    gradient = min(max(_TOLERANCE * long_s / sample_s, 0.5), 1.0)
    # A limit far above what runs has no effect: it comes down from what runs.
    base = limit.limit if gradient == 1.0 else min(limit.limit, 2.0 * max(in_flight, limit.least))
    wanted = base * gradient + _HEADROOM
    moved = (1.0 - _SMOOTHING) * limit.limit + _SMOOTHING * wanted
    return replace(learnt, limit=min(max(moved, limit.least), limit.most))
