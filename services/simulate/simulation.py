"""Runs a trace through simulated workers. Deterministic: equal arguments give equal outcomes."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.errors import LoraplexError
from loraplex.workload import RequestOutcome, TracedRequest
from loraplex_services.gateway.admission.controller import Permit
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.gateway import Due, SimulatedGateway
from loraplex_services.simulate.virtual_loop import VirtualLoop
from loraplex_services.simulate.worker import SimulatedWorker
from loraplex_services.worker.types.messages import EngineConfig, StepOutput, Submit

_TO_GATE, _TO_WORKER, _BACK_TO_GATE = 0.45, 0.15, 0.25
"""Shares of the time outside the engine, as timestamps showed; the rest is the time from gateway to
client."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The fleet on which a trace is run."""

    costs: Costs
    engine: EngineConfig
    """Settings of every worker; `arena_bytes` is its arena."""
    num_workers: int = 1
    on_disk: bool = False
    """Adapters are already on every worker's disk."""
    deadline_s: float | None = None
    """Deadline of every request, from its arrival; None = no deadline."""
    first_token_s: float | None = None
    """Time from arrival within which the first token is due; None = only the deadline counts."""
    admission: AdmissionLimits | None = None
    """Limits of each gateway; None = no gateway: requests queue at the workers."""
    num_gateways: int = 1
    overlaps: bool = False
    """Workers plan a step while the one before runs, as on GPUs."""
    newest_first: bool = False
    """Last come, first served, as a baseline: requests are numbered by priority."""


@dataclass(slots=True)
class Tally:
    """Totals over a simulation."""

    steps: int = 0
    loads: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A request at a worker."""

    ended: asyncio.Future[str]
    """When the gateway learns of it; with the reason why it did not finish, if it did not."""
    permit: Permit | None
    """The permit at the gateway."""
    back_s: float
    """Time of tokens from the worker to the gateway."""
    first_token_s: float | None = None
    end_s: float = 0.0
    num_output: int = 0
    num_reported: int = 0
    """Tokens that the gateway knows of."""

    def take(self, num_tokens: int, now_s: float) -> None:
        """Tokens leave the worker."""
        self.num_output += num_tokens
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.ended.get_loop().call_at(now_s + self.back_s, self._report)

    def end(self, reason: str, now_s: float) -> None:
        """Its last tokens, or its failure, leave the worker."""
        self.end_s = now_s
        self.ended.get_loop().call_at(now_s + self.back_s, self._finish, reason)

    def _finish(self, reason: str) -> None:
        self._report()
        self.ended.set_result(reason)

    def _report(self) -> None:
        """Report at the first token and at the end. What comes between matters only for what a
        tenant is charged."""
        if self.permit is not None:
            self.permit.served(self.num_output - self.num_reported)
        self.num_reported = self.num_output


class Simulation:
    """A trace that runs through a fleet."""

    def __init__(self, fleet: SimulatedFleet, ranks: Sequence[int]) -> None:
        """`ranks`: of each adapter of the trace."""
        self._fleet = fleet
        self._digests = [_digest(index) for index in range(len(ranks))]
        self._ranks = dict(zip(self._digests, ranks, strict=True))
        self.workers = [
            SimulatedWorker(
                i, fleet.costs, fleet.engine, on_disk=fleet.on_disk, overlaps=fleet.overlaps
            )
            for i in range(fleet.num_workers)
        ]
        self._gateways = [
            SimulatedGateway(self.workers, fleet.admission) for _ in range(fleet.num_gateways)
        ]
        self._flights: dict[str, _Flight] = {}
        self._outcomes: dict[int, RequestOutcome] = {}
        self._num_in_flight = 0
        """Requests that clients have sent and whose answers have not ended."""
        self._rng = random.Random(0)
        self._events: list[tuple[float, int]] = []
        """When workers begin or end a step, soonest first. Those that are no
        worker's `next_event_s` any more are passed over."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer for the first of them."""
        self.tally = Tally()

    def run(self, trace: Sequence[TracedRequest]) -> list[RequestOutcome]:
        """Every request's outcome, in the order of the trace."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            self._loop = loop
            runner.run(self._play(trace))
        assert not self._flights, "requests left over"
        for worker in self.workers:
            worker.engine.check_integrity()
        self.tally.steps = sum(w.view().load.steps for w in self.workers)
        self.tally.preemptions = sum(w.engine.scheduler.num_preemptions for w in self.workers)
        return [self._outcomes[number] for number in range(len(trace))]

    async def _play(self, trace: Sequence[TracedRequest]) -> None:
        loop = self._loop
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(trace):
                await asyncio.sleep(request.arrival_s - loop.time())
                outside_s = self._fleet.costs.outside(self._rng, not self._num_in_flight)
                self._num_in_flight += 1
                group.create_task(self._serve(number, request, outside_s))

    async def _serve(self, number: int, request: TracedRequest, outside_s: float) -> None:
        """One request, from its client and back."""
        loop = self._loop
        await asyncio.sleep(_TO_GATE * outside_s)
        flight = _Flight(loop.create_future(), None, _BACK_TO_GATE * outside_s)
        try:
            reason = await self._submitted(number, request, flight, _TO_WORKER * outside_s)
        except LoraplexError as error:
            flight.end_s, reason = loop.time(), error.reason
        self._num_in_flight -= 1
        back_s = (1.0 - _TO_GATE - _TO_WORKER) * outside_s
        first_s = flight.first_token_s
        self._outcomes[number] = RequestOutcome(
            arrival_s=request.arrival_s,
            first_token_s=None if first_s is None else first_s + back_s,
            end_s=flight.end_s + back_s,
            num_output=flight.num_output,
            finished=not reason,
            reason=reason,
        )

    async def _submitted(
        self, number: int, request: TracedRequest, flight: _Flight, to_worker_s: float
    ) -> str:
        """Run a request from the gateway to the last token; returns why it did not finish, if it
        did not.

        Raises: ResourceExhausted, DeadlineExceeded.
        """
        now_s = self._loop.time
        digests = () if request.adapter is None else (self._digests[request.adapter],)
        key = digests[0] if digests else str(number)
        due = Due(self._fleet.deadline_s, self._fleet.first_token_s).shifted(now_s())
        gateway = self._gateways[number % len(self._gateways)]
        async with gateway.admit(request, digests, due) as flight.permit:
            worker = gateway.start(key, digests, request.num_input)
            self._flights[str(number)] = flight
            priority = -number if self._fleet.newest_first else 0
            submit = _submit(number, request, digests, due.shifted(-now_s()), priority)
            worker.submit(now_s() + to_worker_s, submit, self._ranks)
            self._line_up(worker)
            try:
                return await flight.ended
            finally:
                gateway.end(key)

    def _line_up(self, worker: SimulatedWorker) -> None:
        if (moment_s := worker.next_event_s) < math.inf:
            heapq.heappush(self._events, (moment_s, worker.index))
            self._wake_at(self._events[0][0])

    def _wake_at(self, moment_s: float) -> None:
        if self._timer is None or moment_s < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(moment_s, self._advance_workers)

    def _advance_workers(self) -> None:
        """Run all workers until the next event."""
        self._timer = None
        while self._events:
            moment_s, index = self._events[0]
            if moment_s > self._loop.time() and not self._loop.pass_until(moment_s):
                self._wake_at(moment_s)
                return
            heapq.heappop(self._events)
            worker = self.workers[index]
            if moment_s == worker.next_event_s:  # else another event of this worker came first
                if (output := worker.advance()) is not None:
                    self._take_in(output, moment_s)
                if (next_s := worker.next_event_s) < math.inf:
                    heapq.heappush(self._events, (next_s, index))

    def _take_in(self, output: StepOutput, now_s: float) -> None:
        self.tally.loads += len(output.copies_s)
        for token in output.tokens:
            self._flights[token.request_id].take(len(token.token_ids), now_s)
            if token.finish_reason:
                self._flights.pop(token.request_id).end("", now_s)
        for failure in output.failures:
            self._flights.pop(failure.request_id).end(failure.error.reason, now_s)
        for gateway in self._gateways:
            gateway.step_ended()


def _submit(
    number: int, request: TracedRequest, digests: tuple[str, ...], left: Due, priority: int
) -> Submit:
    """Prompts share no token, as random ones hardly do."""
    start = number << 13
    return Submit(
        request=WorkerRequest(
            request_id=str(number),
            prompt_ids=list(range(start, start + request.num_input)),
            sampling=SamplingParams(max_tokens=request.num_output, seed=0, ignore_eos=True),
            adapters=AdapterSet(tuple((digest, 1.0) for digest in digests)),
            tenant=request.tenant,
            priority=priority,
            remaining_s=left.end_s,
            remaining_first_token_s=left.first_token_s,
        )
    )


def _digest(index: int) -> str:
    return "sha256:" + hashlib.sha256(str(index).encode()).hexdigest()
