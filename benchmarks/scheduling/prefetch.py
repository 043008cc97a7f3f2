"""Simulated: slots that are idle for copies of adapters, with prefetching and without.

    python -m benchmarks run scheduling.prefetch [--shares 1,1.2] [--seeds 3] [--gateway]

2,000 adapters of ranks 64, 32, 16 and 8 on one worker, lengths U[8,512], first come, first served,
at shares of the capacity, which is measured first. Two bases at roofline costs: on a 24 GB GPU
memory bounds the batch, and with 16 slots the slots do. Copies come from host memory (12 GB/s) or
from a disk (1 GB/s). Steps overlap, as on a GPU, or follow each other, as on a CPU: a request that
comes during a step is seen at the end of that step, where the next one has been launched or not.
Requests queue at the worker, or at a gateway with `--gateway`.

Prints, with the adapters of the next K requests loaded ahead (0 = none), the slot seconds that were
idle because of a copy, over those without prefetching; the parts of them (`IdleTime`); the mean
first token; and copies per request.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import capacity, fleet
from loraplex.api.residency import Tier
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Workload, generate, ranks_of, summarize
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.simulate.worker import SimulatedWorker
from loraplex_services.worker.scheduling import lookahead
from loraplex_services.worker.scheduling.admission import peak_kv_blocks
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import StepPlan

NUM_ADAPTERS = 2000
COPY_BYTES_PER_S = {"host": 12e9, "disk": 1e9}
NUM_SLOTS = {"slots": 16, "memory": 256}
"""The number of slots, by what limits the batch."""
OVERLAPS = {"overlap": True, "follow": False}
"""Whether steps overlap, by name."""
RANKS = ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS)


class Cause(StrEnum):
    """Why a slot is idle while a request waits only for its adapter."""

    QUEUED = "queued"
    """A copy. The request was in the queue when the batch was full, so that the copy could have
    been ahead of it."""
    NEW = "new"
    """A copy, and the request was never in the queue of a full batch."""
    BLOCKS = "blocks"
    """Memory: the copy could not begin, since a step in flight still reads the blocks for it, or
    running requests hold them."""


class IdleTime:
    """Slot seconds of one worker by cause. At each plan, counts the requests that would have
    started together with all others in front of them if every copy took no time."""

    def __init__(self, worker: SimulatedWorker, max_running: int, overlaps: bool) -> None:
        self.of_cause_s = dict.fromkeys(Cause, 0.0)
        self._max_running, self._overlaps = max_running, overlaps
        self._clock = worker.clock
        self._scheduler = scheduler = worker.engine.scheduler
        self._cache = worker.engine.cache
        loads = worker.engine.adapter_loads
        self._plan, self._await_copies = scheduler.plan, loads.await_copies
        scheduler.plan = self._observed_plan  # type: ignore[method-assign]
        loads.await_copies = self._observed_wait  # type: ignore[method-assign]
        self._idle: Counter[Cause] = Counter()
        """Slots that are idle now."""
        self._since_s = 0.0
        self._full_s = -math.inf
        """The last plan that left the batch full."""
        self._waits: list[tuple[float, Counter[Cause]]] = []
        """How long the step that is being planned has waited for copies, and of which adapters."""

    def _observed_plan(self, now: float, arrive: Callable[[int], bool] | None = None) -> StepPlan:
        for cause, count in self._idle.items():
            self.of_cause_s[cause] += count * (self._clock.now_s - self._since_s)
        plan = self._plan(now, arrive)
        for wait_s, awaited in self._waits:
            for cause, count in awaited.items():
                self.of_cause_s[cause] += len(plan.rows) * wait_s * count / awaited.total()
        self._waits.clear()
        self._idle, self._since_s = self._idle_slots(), self._clock.now_s
        if self._scheduler.is_full or self._scheduler.num_running == self._max_running:
            self._full_s = self._clock.now_s
        return plan

    def _observed_wait(self, num_rows: int, num_wanted: int, step_s: float) -> bool:
        """Steps that overlap compute in the meantime."""
        begin_s, awaited = self._clock.now_s, self._idle_slots()
        has_waited = self._await_copies(num_rows, num_wanted, step_s)
        if awaited and not (self._overlaps and num_rows):
            self._waits.append((self._clock.now_s - begin_s, awaited))
        return has_waited

    def _idle_slots(self) -> Counter[Cause]:
        """Numbers of slots by cause, in the state that the last walk over the queue left."""
        scheduler, cache = self._scheduler, self._cache
        found: list[Request] = []
        for request in scheduler.awaiting_copies[: self._max_running - scheduler.num_running]:
            held = cache.held_blocks + cache.new_blocks(
                digest for r in (*found, request) for digest in r.adapters.digests
            )
            peak = peak_kv_blocks((*scheduler._running, *found, request), scheduler._layout)
            if found and held + peak > scheduler._arena.num_blocks:
                break
            found.append(request)
        return Counter(map(self._cause, found))

    def _cause(self, request: Request) -> Cause:
        if any(self._cache.tier(digest) is Tier.DISK for digest in request.adapters.digests):
            return Cause.BLOCKS
        return Cause.QUEUED if request.arrival_s <= self._full_s else Cause.NEW


def setting(bound: str, source: str, steps: str, with_gateway: bool) -> SimulatedFleet:
    """The worker of `slora_worker` with other slots, copies and steps."""
    base = fleet()
    engine = msgspec.structs.replace(
        base.engine, max_num_seqs=NUM_SLOTS[bound], max_resident=NUM_ADAPTERS
    )
    return dataclasses.replace(
        base,
        engine=engine,
        costs=dataclasses.replace(base.costs, load_byte_s=1 / COPY_BYTES_PER_S[source]),
        overlaps=OVERLAPS[steps],
        admission=AdmissionLimits() if with_gateway else None,
    )


def measure(fleet_: SimulatedFleet, workload: Workload) -> dict[str, float]:
    """One run."""
    simulation = Simulation(fleet_, RANKS)
    [worker] = simulation.workers
    idle = IdleTime(worker, fleet_.engine.max_num_seqs, fleet_.overlaps)
    outcomes = simulation.run(generate(workload))
    summary, tally = summarize(outcomes), simulation.tally
    copies_s = idle.of_cause_s[Cause.QUEUED] + idle.of_cause_s[Cause.NEW]
    return {
        "idle_for_copies_s": copies_s,
        **{f"{cause}_s": idle_s for cause, idle_s in idle.of_cause_s.items()},
        "first_token_mean_s": summary.first_token.mean_s,
        "requests_per_s": summary.requests_per_s,
        "copies_per_request": tally.loads / len(outcomes),
        "preemptions": float(tally.preemptions),
    }


def main() -> None:
    """Print the table and write `results/simulated/prefetch.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", default=",".join(OVERLAPS))
    parser.add_argument("--shares", default="1,1.2")
    parser.add_argument("--requests", default="0,1,4,16", help="whose adapters load ahead")
    parser.add_argument("--gateway", action="store_true", help="requests queue at a gateway")
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows: list[list[str]] = []
    runs: list[dict[str, Any]] = []
    for steps, bound, source in itertools.product(
        args.steps.split(","), NUM_SLOTS, COPY_BYTES_PER_S
    ):
        fleet_ = setting(bound, source, steps, args.gateway)
        alone = dataclasses.replace(fleet_, admission=None)
        per_s = capacity(alone, NUM_ADAPTERS, RANK_MIXES["S2"]).per_s
        for share in map(float, args.shares.split(",")):
            without: dict[str, float] = {}
            for num_requests in map(int, args.requests.split(",")):
                lookahead.NUM_REQUESTS = num_requests
                found = [
                    measure(fleet_, Workload(NUM_ADAPTERS, share * per_s, args.duration, seed=seed))
                    for seed in range(args.seeds)
                ]
                run = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
                without = without or run
                for name, key in (("of_idle", "idle_for_copies_s"), ("of_queued", "queued_s")):
                    run[name] = run[key] / without[key] if without[key] else math.nan
                setting_ = {"steps": steps, "bound": bound, "copies_from": source, "share": share}
                runs.append({**setting_, "lookahead": num_requests, **run})
                numbers = ("idle_for_copies_s", "of_idle", "queued_s", "of_queued", "new_s")
                rows.append(
                    [*map(str, setting_.values()), str(num_requests)]
                    + [f"{run[key]:.2f}" for key in (*numbers, "blocks_s")]
                    + [f"{run['first_token_mean_s']:.3f}", f"{run['copies_per_request']:.2f}"]
                )
    print("simulated, 2,000 adapters, S2, one worker")
    head = ("STEPS", "BOUND", "COPIES FROM", "RATE / CAPACITY", "K", "IDLE (s)", "OF K=0")
    head += ("QUEUED (s)", "OF K=0", "NEW (s)", "BLOCKS (s)", "FIRST TOKEN (s)")
    print_table((*head, "COPIES / REQUEST"), rows)
    name = "prefetch_gateway" if args.gateway else "prefetch"
    write_results(name, {"simulated": True, "runs": runs}, args)


if __name__ == "__main__":
    main()
