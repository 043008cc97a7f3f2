"""Gives up requests that are past their deadline or cannot have a first token in time.

A request's first token is due at the request's deadline, or at the moment that the request names
for it if that is sooner. See `early_abort` for the rule.
"""

from __future__ import annotations

from dataclasses import replace

from loraplex.api.residency import Tier
from loraplex.errors import DeadlineExceeded, LoraplexError
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.scheduling.early_abort import (
    Alarms,
    RemainingWork,
    ServiceTimes,
    latest_start_s,
)
from loraplex_services.worker.scheduling.queue import WaitingQueue
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.request import Request


class Deadlines:
    """Watches live requests. A request is checked only at the times at which it may have become too
    late."""

    def __init__(
        self,
        cache: AdapterCache,
        prefixes: PrefixCache,
        queues: tuple[WaitingQueue, RunningBatch],
    ) -> None:
        self._cache = cache
        self._prefixes = prefixes
        self._waiting, self._running = queues
        self._ends = Alarms()
        self._starts = Alarms()
        """The latest moments at which requests can start."""
        self.times = ServiceTimes()

    def watch(self, request: Request) -> None:
        """Begin to watch a request."""
        if request.deadline_s is not None:
            self._ends.set(request.deadline_s, request)
        if self._due_s(request) is not None:
            self._starts.set(self._latest_start_s(request, request.arrival_s), request)

    def passed(self, now: float) -> dict[Request, LoraplexError]:
        """Requests whose deadline has passed, or that can no longer have a first token in time."""
        lost: dict[Request, LoraplexError] = {}
        for request in self._ends.due(now, self.is_live):
            lost[request] = DeadlineExceeded("the request's deadline has passed")
        for request in self._starts.due(now, self.is_live):
            if not _is_fresh(request) or request in lost:
                continue
            if (latest_s := self._latest_start_s(request, now)) > now:
                self._starts.set(latest_s, request)
            else:
                lost[request] = _infeasible()
        return lost

    def too_late(self, request: Request, now: float) -> LoraplexError | None:
        """Why a waiting request must not start any more."""
        if self._due_s(request) is None or not _is_fresh(request):
            return None
        return _infeasible() if self._latest_start_s(request, now) <= now else None

    def is_live(self, request: Request) -> bool:
        """True while the request waits or runs."""
        request_id = request.request_id
        return request in (self._waiting.get(request_id), self._running.get(request_id))

    def _due_s(self, request: Request) -> float | None:
        """The time at which the first token is due."""
        moments = (request.deadline_s, request.first_token_due_s)
        return min((moment for moment in moments if moment is not None), default=None)

    def _latest_start_s(self, request: Request, now: float) -> float:
        """The latest time at which `request` can start and be in time. The prefix cache is
        consulted only if the request would be too late without it."""
        due_s = self._due_s(request)
        assert due_s is not None, request.request_id
        tiers = [self._cache.tier(digest) for digest in request.adapters.digests]
        work = RemainingWork(
            num_tokens=request.num_pending,
            num_copies=sum(tier < Tier.DEVICE for tier in tiers),
            fetched_for_s=now - request.arrival_s if Tier.NONE in tiers else None,
        )
        is_contended = len(self._running) + len(self._waiting) > 1
        latest_s = latest_start_s(due_s, work, self.times, is_contended)
        if latest_s <= now and (num_cached := self._prefixes.match(request)):
            work = replace(work, num_tokens=request.num_pending - num_cached)
            latest_s = latest_start_s(due_s, work, self.times, is_contended)
        return latest_s


def _is_fresh(request: Request) -> bool:
    """True before any of its tokens was computed, here or on another worker."""
    return request.first_scheduled_s is None and not request.output_ids


def _infeasible() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the first token would come after the request's deadline or first_token_s: allow more "
        "time or try later",
        reason="DEADLINE_INFEASIBLE",
    )
