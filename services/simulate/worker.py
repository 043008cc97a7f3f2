"""One simulated worker: the real engine, fed from an inbox in the order of virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.gateway.workers.view import WorkerView
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.runner import TimedRunner, VirtualClock
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Command,
    EngineConfig,
    StepOutput,
    Submit,
)

STALLED_WAIT_S = 0.1
"""Sleep of the engine's loop while every request waits for something."""
DEADLOCK_STALLS = 10_000
"""After this many consecutive sleeps without an event, none will come."""


class EveryAdapter(dict[str, AdapterResidency]):
    """The residency of a worker that has every adapter: those without an entry are on its disk."""

    def __contains__(self, digest: object) -> bool:
        return True

    def get(self, digest: str, default: Any = None) -> AdapterResidency:
        """The entry, or one that says that the adapter is on disk."""
        return super().get(digest) or AdapterResidency(digest, Tier.DISK)


class SimulatedWorker:
    """An engine, its clock, and what its API server would do: fetch adapters, deliver commands."""

    def __init__(
        self,
        index: int,
        costs: Costs,
        config: EngineConfig,
        *,
        on_disk: bool,
        overlaps: bool = False,
    ) -> None:
        """
        Args:
            on_disk: every adapter is already on the worker's disk, and nothing is fetched.
            overlaps: as in `TimedRunner`.
        """
        self.index = index
        self.worker_id = f"worker-{index}"
        self._costs = costs
        self._on_disk = on_disk
        self.clock = VirtualClock()
        self._runner = TimedRunner(
            costs, config.arena_bytes, self.clock, seed=index, overlaps=overlaps
        )
        self.engine = Engine(self._runner, config, self.clock)
        self._inbox: list[tuple[float, int, Command]] = []
        self._order = itertools.count()
        self._fetched_s: dict[str, float] = {}
        """When adapters were, or will be, on this worker's disk."""
        self._load = WorkerLoad()
        self._residency: dict[str, AdapterResidency] = EveryAdapter() if on_disk else {}
        self._stalls = 0
        self._in_flight: dict[str, tuple[str, ...]] = {}
        """Requests sent here that have not ended, and their adapters."""
        self._unstarted: dict[str, int] = {}
        """Prompt tokens of those without a first token."""
        self._unstarted_tokens = 0
        """Their sum."""
        self._requested: frozenset[str] = frozenset()
        """Adapters of those in flight."""
        self._output: StepOutput | None = None
        """Output of the current step."""
        self._view: WorkerView | None = None

    def submit(self, moment_s: float, command: Submit, ranks: dict[str, int]) -> None:
        """Deliver a request at `moment_s`, fetching what adapters it needs (rank by digest)."""
        request = command.request
        self._in_flight[request.request_id] = request.adapters.digests
        self._requested |= set(request.adapters.digests)
        self._unstarted[request.request_id] = len(request.prompt_ids)
        self._unstarted_tokens += len(request.prompt_ids)
        self._view = None
        self._deliver(moment_s, command)
        for digest in request.adapters.digests:  # a request must wait to learn that one is refused
            self._fetch(moment_s, digest, ranks[digest])

    def _fetch(self, moment_s: float, digest: str, rank: int) -> None:
        if digest not in self._fetched_s:
            num_bytes = int(rank * self._costs.adapter_bytes_per_rank)
            wait_s = 0.0 if self._on_disk else self._costs.fetch(num_bytes)
            self._fetched_s[digest] = moment_s + wait_s
        # For each request, as the engine forgets an adapter that it cannot load.
        num_pages = self._costs.adapter_pages(rank)
        fetched = AdapterFetched(digest, digest, rank, num_pages)
        self._deliver(max(moment_s, self._fetched_s[digest]), fetched)

    def _deliver(self, moment_s: float, command: Command) -> None:
        heapq.heappush(self._inbox, (moment_s, next(self._order), command))

    @property
    def next_step_s(self) -> float:
        """When the next step begins; infinite when nothing is to do."""
        now = self.clock.now_s
        if self.engine.may_advance:
            return now
        arrival_s = self._inbox[0][0] if self._inbox else math.inf
        patience_s = now + STALLED_WAIT_S if self.engine.has_requests else math.inf
        return max(now, min(arrival_s, patience_s, self._runner.next_copy_s))

    @property
    def next_event_s(self) -> float:
        """When the current step ends or the next one begins."""
        return self.next_step_s if self._output is None else self.clock.now_s

    def advance(self) -> StepOutput | None:
        """End the current step, which yields its output, and begin the next one if it is time."""
        output, now_s = self._output, self.next_event_s
        if output is not None:
            self._take_in(output)
            self._output = None
        if self.next_step_s <= now_s:
            self._output = self._step(now_s)
        return output

    def _step(self, now_s: float) -> StepOutput:
        """Run one step; its output belongs to the time of the clock afterwards."""
        self.clock.advance_to(now_s)
        commands: list[Command] = []
        while self._inbox and self._inbox[0][0] <= now_s:
            commands.append(heapq.heappop(self._inbox)[2])
        output = self.engine.step(commands)
        self._stalls = 0 if commands or output.tokens or output.failures else self._stalls + 1
        assert self._stalls < DEADLOCK_STALLS, "requests wait for something that never comes"
        return output

    def _take_in(self, output: StepOutput) -> None:
        """The report of a step to a gateway."""
        self._view = None
        for token in output.tokens:
            self._unstarted_tokens -= self._unstarted.pop(token.request_id, 0)
            if token.finish_reason:
                self._forget(token.request_id)
        for failure in output.failures:
            self._forget(failure.request_id)
        self._load = output.load
        for residency in (change.residency for change in output.residency):
            if residency.tier is Tier.NONE:
                self._residency.pop(residency.digest, None)
            else:
                self._residency[residency.digest] = residency

    def _forget(self, request_id: str) -> None:
        self._unstarted_tokens -= self._unstarted.pop(request_id, 0)
        del self._in_flight[request_id]
        self._requested = frozenset(itertools.chain.from_iterable(self._in_flight.values()))

    def view(self) -> WorkerView:
        """The view of a gateway that is informed of every step immediately."""
        if self._view is None:
            self._view = WorkerView(
                worker_id=self.worker_id,
                address=self.worker_id,
                base_id="simulated",
                connected=True,
                ready=True,
                load=self._load,
                adapters=self._residency,
                in_flight=len(self._in_flight),
                in_flight_tokens=self._unstarted_tokens,
                requested=self._requested,
            )
        return self._view
