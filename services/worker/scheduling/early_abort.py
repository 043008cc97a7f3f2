"""Gives up requests that cannot meet their deadline, so that steps serve others.

A waiting request expires when it could not have its first token before its deadline even if
it started now: what remains is less than loading and prefill take, as measured here recently. Work
that has begun is never thrown away.

Source: S-LoRA section 4.3 (early abort), with deadlines of the requests' own and measured times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex_services.worker.scheduling.samples import Samples, SizedSamples
from loraplex_services.worker.types.request import Request

MIN_SWEPT = 256
"""Alarms of ended requests are removed when there are more alarms than this, and more than twice as
many as live requests."""
CONTENDED_QUANTILE = 0.99
"""The quantile by which a request must be in time if there are other requests. One that is alone
may start if it could be in time in the best case."""


@dataclass(slots=True)
class ServiceTimes:
    """Recent durations of the phases before a first token."""

    prefills: SizedSamples = field(default_factory=SizedSamples)
    """Times from first step to first token, by number of tokens."""
    copies: Samples = field(default_factory=Samples)
    """Times until copies of adapters to the device are ready for steps."""
    fetches: Samples = field(default_factory=Samples)
    """Times of fetches of adapters from the object store to disk."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The work between a waiting request and its first token."""

    num_tokens: int
    """Prompt tokens to compute."""
    num_copies: int = 0
    """Adapters to copy to the device."""
    fetched_for_s: float | None = None
    """How long adapters have been fetched for it, in seconds; None = all are on disk."""


def needed_s(work: RemainingWork, times: ServiceTimes, share: float) -> float:
    """Seconds to the first token from now, at a quantile of what was measured."""
    seconds = times.prefills.quantile(work.num_tokens, share)
    seconds += work.num_copies * times.copies.quantile(share)
    if work.fetched_for_s is not None:
        # A wait costs other requests nothing, so the fastest fetch counts in every case.
        seconds += max(0.0, times.fetches.quantile(0.0) - work.fetched_for_s)
    return seconds


def latest_start_s(
    deadline_s: float, work: RemainingWork, times: ServiceTimes, is_contended: bool
) -> float:
    """The time from which a request that has not started will miss its deadline."""
    share = CONTENDED_QUANTILE if is_contended else 0.0
    return deadline_s - needed_s(work, times, share)


class Alarms:
    """Times at which requests must be looked at again, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0
        self._sweep_at = MIN_SWEPT

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, when_s: float, request: Request) -> None:
        """Check `request` again at `when_s`."""
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, request))

    def due(self, now: float, is_live: Callable[[Request], bool]) -> list[Request]:
        """Requests that are due. Requests that ended in the meantime are dropped."""
        if len(self._heap) > self._sweep_at:
            self._heap = [alarm for alarm in self._heap if is_live(alarm[-1])]
            heapq.heapify(self._heap)
            self._sweep_at = max(MIN_SWEPT, 2 * len(self._heap))
        requests = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[-1]
            if is_live(request):
                requests.append(request)
        return requests
