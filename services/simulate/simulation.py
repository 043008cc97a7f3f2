"""Run a trace through simulated workers. Deterministic: equal arguments give equal outcomes."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.workload import Outcome, TracedRequest
from services.gateway.routing import HomeSizes, Placement, choose
from services.simulate.costs import Costs
from services.simulate.worker import SimulatedWorker
from services.worker.messages import EngineConfig, StepOutput, Submit
from services.worker.request import AdapterSet, SamplingParams


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the trace is run on."""

    costs: Costs
    engine: EngineConfig
    """Of every worker; `arena_bytes` is its arena."""
    num_workers: int = 1
    on_disk: bool = False
    """Adapters lie on every worker's disk already."""
    deadline_s: float | None = None
    """Of every request, from its arrival; None = patient clients."""


@dataclass(slots=True)
class Tally:
    """Totals over a simulation."""

    steps: int = 0
    loads: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Flight:
    request: TracedRequest
    key: str
    worker: SimulatedWorker
    first_token_s: float | None = None
    num_output: int = 0


class Simulation:
    """A trace on its way through a fleet."""

    def __init__(self, fleet: Fleet, ranks: Sequence[int]) -> None:
        """`ranks`: of each adapter of the trace."""
        self._fleet = fleet
        self._digests = [_digest(index) for index in range(len(ranks))]
        self._ranks = dict(zip(self._digests, ranks, strict=True))
        self._workers = [
            SimulatedWorker(i, fleet.costs, fleet.engine, on_disk=fleet.on_disk)
            for i in range(fleet.num_workers)
        ]
        self._by_id = {worker.worker_id: worker for worker in self._workers}
        self._turns: list[tuple[float, int]] = []
        """When workers step next, soonest first; only `SimulatedWorker.next_step_s` is true."""
        self._homes = HomeSizes()
        self._flights: dict[str, _Flight] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._rng = random.Random(0)
        self.tally = Tally()

    def run(self, trace: Sequence[TracedRequest]) -> list[Outcome]:
        """Every request's outcome, in the order of the trace."""
        for index, request in enumerate(trace):
            self._run_until(request.arrival_s)
            self._send(str(index), request)
        self._run_until(None)
        assert not self._flights, "requests left over"
        self.tally.steps = sum(w.view().load.steps for w in self._workers)
        self.tally.preemptions = sum(w.engine.scheduler.num_preemptions for w in self._workers)
        return [self._outcomes[str(index)] for index in range(len(trace))]

    def check_integrity(self) -> None:
        """Assert that every worker's blocks and slots are accounted for."""
        for worker in self._workers:
            worker.engine.check_integrity()

    def _run_until(self, moment_s: float | None) -> None:
        """Steps that begin before `moment_s`; None = until nothing is to do."""
        while self._turns and (moment_s is None or self._turns[0][0] < moment_s):
            begin_s, index = heapq.heappop(self._turns)
            worker = self._workers[index]
            if begin_s != worker.next_step_s:
                continue  # something came meanwhile, and with it another turn
            self._take_in(worker.step(), worker)
            self._line_up(worker)

    def _line_up(self, worker: SimulatedWorker) -> None:
        if (moment_s := worker.next_step_s) < math.inf:
            heapq.heappush(self._turns, (moment_s, worker.index))

    def _send(self, request_id: str, request: TracedRequest) -> None:
        digests = () if request.adapter is None else (self._digests[request.adapter],)
        key = digests[0] if digests else request_id
        size = self._homes.start(key, len(self._workers))
        placement = Placement(key, digests, request.num_input, homes=size if digests else 0)
        view = choose([worker.view() for worker in self._workers], placement)
        assert view is not None, "every simulated worker takes requests"
        worker = self._by_id[view.worker_id]
        self._flights[request_id] = _Flight(request, key, worker)
        moment_s = request.arrival_s + self._fleet.costs.outside(self._rng)
        worker.submit(moment_s, self._submit(request_id, request, digests), self._ranks)
        self._line_up(worker)

    def _submit(self, request_id: str, request: TracedRequest, digests: tuple[str, ...]) -> Submit:
        """Prompts share no token, as random ones hardly do."""
        start = int(request_id) << 13
        return Submit(
            request_id=request_id,
            prompt_ids=list(range(start, start + request.num_input)),
            sampling=SamplingParams(max_tokens=request.num_output, seed=0, ignore_eos=True),
            adapters=AdapterSet(tuple((digest, 1.0) for digest in digests)),
            remaining_s=self._fleet.deadline_s,
        )

    def _take_in(self, output: StepOutput, worker: SimulatedWorker) -> None:
        now = worker.clock.now_s
        self.tally.loads += len(output.copies_s)
        for token in output.tokens:
            flight = self._flights[token.request_id]
            if flight.first_token_s is None:
                flight.first_token_s = now
            flight.num_output += len(token.token_ids)
            if token.finish_reason:
                self._end(token.request_id, now, "")
        for failure in output.failures:
            self._end(failure.request_id, now, failure.error.reason)

    def _end(self, request_id: str, now: float, reason: str) -> None:
        flight = self._flights.pop(request_id)
        self._homes.end(flight.key)
        self._outcomes[request_id] = Outcome(
            arrival_s=flight.request.arrival_s,
            first_token_s=flight.first_token_s,
            end_s=now,
            num_output=flight.num_output,
            finished=not reason,
            reason=reason,
        )


def _digest(index: int) -> str:
    return "sha256:" + hashlib.sha256(str(index).encode()).hexdigest()
