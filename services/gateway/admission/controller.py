"""Admits requests: combines the pure queue with a clock and one future per waiting request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from loraplex_services.gateway.admission.batch_share import BatchShare
from loraplex_services.gateway.admission.dispatch_window import DispatchWindow, ReadyWorkers, Window
from loraplex_services.gateway.admission.queue import (
    AdmissionLimits,
    AdmissionQueue,
    Decision,
    deadline_infeasible,
    queue_full,
)
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.admission.run_times import RequestLatency, RunTimeEstimator
from loraplex_services.gateway.clock import now_s


class Permit:
    """Held by an admitted request while it runs; reports its progress to the controller."""

    def __init__(
        self, controller: AdmissionController, request: AdmissionRequest, predicted: RequestLatency
    ) -> None:
        self._controller = controller
        self._request = request
        self.predicted = predicted
        self._start_s = now_s()
        self._first_s = 0.0
        self._num_tokens = 0

    def served(self, num_tokens: int) -> None:
        """Record that tokens were generated."""
        if not num_tokens:
            return
        if not self._num_tokens:
            self._first_s = now_s()
        self._num_tokens += num_tokens
        self._controller.served(self._request, num_tokens)

    @property
    def num_tokens(self) -> float:
        """Mean number of tokens per sequence of the request."""
        return self._num_tokens / self._request.cost

    def held_s(self) -> float:
        """Seconds since admission."""
        return now_s() - self._start_s

    def latency(self) -> RequestLatency | None:
        """Time to the first token, and mean time between tokens of one sequence.

        None if there are too few tokens to tell, or if the request waited for an adapter.
        """
        gaps = self.num_tokens - 1
        if gaps < 8 or self._request.awaits_fetch:
            return None
        return RequestLatency(self._first_s - self._start_s, (now_s() - self._first_s) / gaps)


class AdmissionController:
    """Admits requests as the admission queue decides."""

    def __init__(
        self,
        limits: AdmissionLimits,
        ready: Callable[[], ReadyWorkers] | None = None,
        *,
        shares_batch: bool = False,
    ) -> None:
        """
        Args:
            ready: returns the workers that take requests; None = the window is unlimited.
            shares_batch: no tenant fills more than its `BatchShare`.
        """
        self.queue = AdmissionQueue(limits)
        """Others only read it."""
        self._ready = ready
        self._share = BatchShare() if shares_batch else None
        self._dispatch_window = DispatchWindow()
        self._run_times = RunTimeEstimator()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        """One future per waiting request, by its number."""
        self._removed: set[int] = set()
        """Numbers of waiting requests that are no longer in the queue."""

    @property
    def expected_wait_s(self) -> float:
        """Expected seconds until a new request would be admitted."""
        return self.queue.expected_wait_s() if self.queue.num_waiting else 0.0

    @property
    def background_limit(self) -> int:
        """Sequences of background requests that may run now."""
        self._look_at_workers()
        return self.queue.background_limit

    def run_s(self, min_tokens: int, max_tokens: int) -> float:
        """Estimated seconds to generate `min_tokens` to `max_tokens`; 0 = unknown."""
        step_s = self._ready().step_s if self._ready is not None else 0.0
        return self._run_times.run_s(min_tokens, max_tokens, step_s)

    @asynccontextmanager
    async def admit(self, request: AdmissionRequest) -> AsyncGenerator[Permit]:
        """Wait for admission and hold the permit.

        Raises: ResourceExhausted, DeadlineExceeded.
        """
        await self._enter(request)
        permit = Permit(self, request, self._run_times.latency)
        try:
            yield permit
            if permit.num_tokens:
                self._run_times.observe_length(permit.num_tokens)
        finally:
            self._learn(permit)
            self.queue.release(request, permit.held_s())
            self._start_ready()

    def served(self, request: AdmissionRequest, num_tokens: int) -> None:
        """A running request generated tokens; its first ones may let another request start."""
        self.queue.charge(request, num_tokens)
        if self.queue.first_token(request) and self.queue.num_waiting:
            if self._ready is not None:
                self._dispatch_window.started(request.in_flight_tokens, now_s(), self._ready())
            self._start_ready()

    def set_limit(self, tenant: str, max_running: int | None) -> None:
        """Limit the sequences of a tenant that run here at once; None = no limit."""
        if max_running is None:
            self.queue.tenant_limits.pop(tenant, None)
        else:
            self.queue.tenant_limits[tenant] = max_running
        self._start_ready()

    async def follow(self, next_change: Callable[[], Awaitable[None]]) -> None:
        """Start waiting requests whenever workers change, until cancelled."""
        while True:
            await next_change()
            self.workers_changed()

    def workers_changed(self) -> None:
        """Workers came or went: the window has changed."""
        self._start_ready()

    def _learn(self, permit: Permit) -> None:
        if (latency := permit.latency()) is not None:
            self._run_times.observe_latency(latency, permit.num_tokens, permit.predicted)

    async def _enter(self, request: AdmissionRequest) -> None:
        if self._share is not None:
            self._share.seen(request.tenant, now_s())
        self._look_at_workers()
        if not self.queue.num_waiting:
            self._dispatch_window.begin(now_s())
        decision = self.queue.offer(request, now_s())
        self._refuse_dropped()
        if decision is Decision.WAIT:
            await self._wait(request)

    def _refuse_dropped(self) -> None:
        """Refuse the waiting requests that the queue dropped."""
        wait_s = self.queue.expected_wait_s()
        for request in self.queue.dropped:
            self._removed.add(request.number)
            waiter = self._waiters[request.number]
            if not waiter.done():
                waiter.set_exception(queue_full(wait_s))
        self.queue.dropped.clear()

    async def _wait(self, request: AdmissionRequest) -> None:
        waiter = self._waiters[request.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(request.start_by_s - now_s()):
                await waiter
        except BaseException as error:
            self._leave_queue(request, waiter)
            if isinstance(error, TimeoutError):
                raise deadline_infeasible() from None
            raise
        finally:
            del self._waiters[request.number]

    def _leave_queue(self, request: AdmissionRequest, waiter: asyncio.Future[None]) -> None:
        """Undo the wait: the request is waiting, was just admitted, or was removed already."""
        if request.number in self._removed:
            self._removed.discard(request.number)
        elif waiter.done() and not waiter.cancelled():
            self.queue.release(request, 0.0)
            self._start_ready()
        else:
            self.queue.withdraw(request)

    def _start_ready(self) -> None:
        if not self.queue.num_waiting:
            return
        self._look_at_workers()
        while started := self.queue.take_ready():
            for request in started:
                waiter = self._waiters[request.number]
                if waiter.done():
                    # Its client has just left, and the task has not run since.
                    self._removed.add(request.number)
                    self.queue.release(request, 0.0)
                else:
                    waiter.set_result(None)

    def _look_at_workers(self) -> None:
        """Set the queue's limits from the free capacity of the workers."""
        if self._ready is None:
            self.queue.window = Window()
            return
        ready = self._ready()
        self.queue.window = self._dispatch_window.window(ready)
        if self._share is not None:
            self.queue.tenant_share = self._share.of_tenant(ready.batch_capacity, now_s())
