"""The gateway's admission and router in front of simulated workers, on a virtual event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loraplex.workload import TracedRequest
from loraplex_services.gateway.admission.controller import AdmissionController, Permit
from loraplex_services.gateway.admission.dispatch_window import ReadyWorkers, ready_workers
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.routing.router import (
    ReplicaCounts,
    RoutingRequest,
    are_fetched,
    choose,
)
from loraplex_services.gateway.workers.view import WorkerView
from loraplex_services.simulate.worker import SimulatedWorker
from loraplex_services.worker.server.status import MIN_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Due:
    """When a request must be done: moments by the loop's clock, None = whenever it is."""

    end_s: float | None = None
    first_token_s: float | None = None

    def shifted(self, by_s: float) -> Due:
        """The same moments, shifted by this time."""
        return Due(*(None if s is None else s + by_s for s in (self.end_s, self.first_token_s)))


class SimulatedGateway:
    """Admits requests and chooses their workers."""

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        limits: AdmissionLimits | None,
    ) -> None:
        """`limits` None: every request is sent to a worker at once and queues there."""
        self._workers = {worker.worker_id: worker for worker in workers}
        self._controller = None if limits is None else AdmissionController(limits, self._ready)
        self._replica_counts = ReplicaCounts()
        self._shown: list[WorkerView] = []
        self._shown_s = -math.inf
        self._announced = ReadyWorkers(0)
        self._announced_s = -math.inf

    @asynccontextmanager
    async def admit(
        self,
        request: TracedRequest,
        digests: Sequence[str],
        due: Due,
    ) -> AsyncGenerator[Permit | None]:
        """Wait for admission and hold its permit. Raises: ResourceExhausted, DeadlineExceeded."""
        if self._controller is None:
            yield None
            return
        admission_request = AdmissionRequest(
            request.tenant,
            deadline_s=math.inf if due.end_s is None else due.end_s,
            num_prompt_tokens=request.num_input,
            run_s=self._controller.run_s(request.num_output, request.num_output),
            first_token_due_s=due.first_token_s,
            adapters=tuple(digests),
            awaits_fetch=not are_fetched(self._views(), digests),
        )
        async with self._controller.admit(admission_request) as permit:
            yield permit

    def start(self, key: str, digests: tuple[str, ...], num_prompt_tokens: int) -> SimulatedWorker:
        """Where a request runs; `end` must follow. `key`: of its replica set."""
        size = self._replica_counts.start(key, len(self._workers))
        num_replicas = size if digests else 0
        routing_request = RoutingRequest(key, digests, num_prompt_tokens, num_replicas)
        view = choose(self._views(), routing_request)
        self._shown_s = -math.inf  # the worker has one request more
        assert view is not None, "every simulated worker takes requests"
        return self._workers[view.worker_id]

    def end(self, key: str) -> None:
        """A request ended."""
        self._replica_counts.end(key)

    def step_ended(self) -> None:
        """Note that some worker has events. All workers report together, no more often than one
        would."""
        if self._controller is not None and self._controller.queue.num_waiting and self._is_due():
            self._controller.workers_changed()

    def _ready(self) -> ReadyWorkers:
        if self._is_due():
            self._announced = ready_workers(self._views())
            self._announced_s = asyncio.get_running_loop().time()
        return self._announced

    def _is_due(self) -> bool:
        return asyncio.get_running_loop().time() >= self._announced_s + MIN_INTERVAL_S

    def _views(self) -> list[WorkerView]:
        """Worker views, made once for all questions of one moment."""
        now_s = asyncio.get_running_loop().time()
        if self._shown_s < now_s:
            self._shown = [worker.view() for worker in self._workers.values()]
            self._shown_s = now_s
        return self._shown
