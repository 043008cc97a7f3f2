"""Simulated: what each control loop changes in the published figures.

    python -m benchmarks run scheduling.control_loops [--only NAME] [--seeds 2]

Each loop of `docs/internals/control-loops.md` that the simulation runs is taken away by itself, and
all figures are simulated again: overload and fairness as `scheduling.overload` has them; the same
on a worker with short steps; two gateways with four tenants and cold adapters (`cold_adapters`), or
with adapters that must be fetched; and a gateway before one worker on the S-LoRA paper's workload
S2 at 0.9 and 1.3 of its capacity. Prints each figure over the one with all loops. A loop whose
removal changes no figure by more than 3% is not worth its lines. Writes
results/simulated/control_loops.json.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling import overload
from benchmarks.scheduling.cold_adapters import (
    DEADLINE_S,
    NUM_WORKERS,
    cold_adapters,
    gateways_before,
)
from benchmarks.scheduling.slora_worker import NUM_ADAPTERS, capacity, fleet
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Workload, generate, ranks_of, summarize
from loraplex_services.common import virtual_counters
from loraplex_services.gateway.admission import (
    dispatch_window,
    queue,
    run_times,
    tenant_queue,
)
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.routing import router
from loraplex_services.simulate import gateway
from loraplex_services.simulate.simulation import Simulation
from loraplex_services.worker.engine.adapter_loads import AdapterLoads
from loraplex_services.worker.scheduling import (
    admission,
    decode_limit,
    early_abort,
    limits,
    lookahead,
    scheduler,
)
from loraplex_services.worker.scheduling import queue as waiting

Figures = dict[str, float]
Removal = tuple[Any, str, Any]
OVERLOAD_S, COLD_S, PAPER_S = 15.0, 60.0, 60.0
NUM_FETCHED = 20_000
"""Adapters in the store."""
FIRST_TOKEN_S = 6.0


def _without_rate(self: Any, num_tokens: int, now_s: float, workers: Any) -> None:
    """The window stays at its lower bound."""


def _window_without(**changes: float) -> Callable[..., Any]:
    with_all = dispatch_window.DispatchWindow.window

    def window(self: Any, workers: Any) -> dispatch_window.Window:
        return dataclasses.replace(with_all(self, workers), **changes)

    return window


def _fits_shared_window(
    self: Any, tenant: str, num_tokens: int, window: dispatch_window.Window, *, fits_batch: bool
) -> bool:
    total = self._total + num_tokens
    limit = max(window.num_tokens, window.max_tokens if fits_batch else 0.0)
    return not self._total or total <= limit


def _oldest(self: Any) -> Any:
    firsts = map(self._first_of, self._waiting.values())
    able = filter(self._tenant_fits, firsts)
    return min(able, key=lambda request: request.number, default=None)


def _oldest_of_tenant(self: Any, served: Any, but_awaiting_fetch: bool) -> Any:
    requests = self.requests.values()
    return next((r for r in requests if not (but_awaiting_fetch and r.awaits_fetch)), None)


def _by_arrival(self: Any, tier_of: Any, served_of: Any) -> None:
    _init_queue(self, tier_of, lambda tenant: 0.0)


_init_queue = waiting.WaitingQueue.__init__


def _visit_and_pass(self: Any, request: Any, queue_pass: Any, now: float) -> bool:
    """Reserved slots do not wait for the oldest request, whose tenant may have no share of them."""
    if self._admission.has_slot(request, now) or len(self._running) >= self._limits.max_running:
        return _visit(self, request, queue_pass, now)
    queue_pass.walk.skip_flow()
    return True


_visit = scheduler.Scheduler._visit


def _patient(self: Any, *args: Any, **kwargs: Any) -> None:
    _init_limits(self, *args, **{**kwargs, "max_overtaking_s": math.inf})


_init_limits = limits.SchedulerLimits.__init__

LOOPS: dict[str, list[Removal]] = {
    "none": [],
    "gateway: its queue": [
        (dispatch_window.DispatchWindow, "window", lambda *args: dispatch_window.Window())
    ],
    "gateway: fair order": [
        (queue.AdmissionQueue, "_next", _oldest),
        (queue.AdmissionQueue, "_is_preceded", lambda self, request: self.num_waiting > 0),
    ],
    "gateway: fair order of a tenant's adapters": [
        (tenant_queue._EquallyUrgent, "first", _oldest_of_tenant)
    ],
    "gateway: measured rate of first tokens": [
        (dispatch_window.DispatchWindow, "started", _without_rate)
    ],
    "gateway: prompts that fill free slots at once": [
        (dispatch_window.DispatchWindow, "window", _window_without(max_tokens=math.inf))
    ],
    "gateway: free slots": [
        (dispatch_window.DispatchWindow, "window", _window_without(batch_capacity=0))
    ],
    "gateway: a tenant's own window": [
        (dispatch_window.InFlightTokens, "fit", _fits_shared_window)
    ],
    "gateway: the window of fetches": [(gateway, "are_fetched", lambda views, digests: True)],
    "gateway: run-time forecast": [(run_times.RunTimeEstimator, "run_s", lambda *args: 0.0)],
    "gateway: refusal by the expected wait": [
        (queue.AdmissionQueue, "expected_wait_s", lambda *args: 0.0)
    ],
    "gateway: size of the replica set": [(router, "replica_count", lambda *args: 1)],
    "gateway: load bound": [(router, "LOAD_BOUND", 1e9)],
    "gateway: loads ahead": [(router, "_LOAD_AHEAD_S", 0.0)],
    "gateway: spare replicas": [(router, "SPARE_REPLICAS", 0)],
    "worker: fair order": [
        (waiting.WaitingQueue, "__init__", _by_arrival),
        (scheduler.Scheduler, "_visit", _visit_and_pass),
    ],
    "worker: early abort": [(early_abort, "needed_s", lambda *args: 0.0)],
    "worker: reserved slots": [(admission, "reserved_slots", lambda num: 0)],
    "worker: tenants expected back": [(virtual_counters, "EXPECTED_BACK_S", 0.0)],
    "worker: end of overtaking": [(limits.SchedulerLimits, "__init__", _patient)],
    "worker: load wait": [(AdapterLoads, "await_copies", lambda *args: False)],
    "worker: lookahead": [(lookahead, "NUM_REQUESTS", 0)],
    "worker: adapters spared for the queue": [(scheduler, "MAX_SPARED", 0)],
    "worker: decode limit": [(decode_limit.DecodeLimit, "skipping", lambda *args: ())],
}


def overloaded(seed: int) -> Figures:
    """The figures of `scheduling.overload`."""
    per_s = overload.capacity(OVERLOAD_S)
    twice = overload.overload(seed, OVERLOAD_S, per_s)
    first = overload.overload(seed, OVERLOAD_S / 3, per_s, warm_up_s=0.0)
    fair = overload.fairness(seed, OVERLOAD_S, per_s)
    return {
        "overload: goodput": twice.goodput_over_capacity,
        "overload: accepted in time": twice.accepted_in_time,
        "first flood: goodput": first.goodput_over_capacity,
        "first flood: accepted in time": first.accepted_in_time,
        "polite p95 beside one share": fair.beside_share_ms,
        "polite p95 beside ten": fair.beside_ten_shares_ms,
    }


def fast(seed: int) -> Figures:
    """The figures of `overloaded` for one worker with 64 slots, whose steps take 4 ms."""
    steps = dataclasses.replace(
        overload.STEPS, step_s=0.004, row_s=1e-5, token_s=1e-5, request_s=0.004, request_p90_s=0.008
    )
    with patch.multiple(
        overload, NUM_WORKERS=1, BATCH=64, STEPS=steps, DEADLINE_S=1.0, WARM_UP_S=1.0
    ):
        per_s = overload.capacity(OVERLOAD_S)
        fair = overload.fairness(seed, OVERLOAD_S / 5, per_s)
    return {
        "fast: capacity": per_s,
        "fast: polite p95 beside one share": fair.beside_share_ms,
        "fast: polite p95 beside ten": fair.beside_ten_shares_ms,
    }


def cold(seed: int) -> Figures:
    """Adapters that no device holds at first."""
    return {f"cold: {name}": value for name, value in cold_adapters(COLD_S, seed).items()}


def fetched(seed: int) -> Figures:
    """The same gateways and workers; hardly any adapter is asked for twice, and all are in the
    store, from which a fetch takes 1.5 s."""
    ranks = ranks_of(RANK_MIXES["S2"], NUM_FETCHED)
    per_s = NUM_WORKERS * capacity(fleet(), NUM_ADAPTERS, RANK_MIXES["S2"]).per_s
    base = fleet(DEADLINE_S, FIRST_TOKEN_S)
    costs = dataclasses.replace(base.costs, fetch_s=1.5)
    workers = dataclasses.replace(gateways_before(base), costs=costs, on_disk=False)
    figures = {}
    for share in (0.8, 1.3):
        trace = generate(Workload(NUM_FETCHED, share * per_s, COLD_S, seed=seed))
        summary = summarize(Simulation(workers, ranks).run(trace), FIRST_TOKEN_S)
        figures[f"fetched at {share}: throughput"] = summary.requests_per_s
        figures[f"fetched at {share}: attainment"] = summary.attainment
    return figures


def paper(seed: int) -> Figures:
    """A gateway before one worker on workload S2."""
    per_s = capacity(fleet(), NUM_ADAPTERS, RANK_MIXES["S2"]).per_s
    figures = {}
    for share in (0.9, 1.3):
        workload = Workload(NUM_ADAPTERS, share * per_s, PAPER_S, seed=seed)
        worker = dataclasses.replace(fleet(60.0, FIRST_TOKEN_S), admission=AdmissionLimits())
        simulation = Simulation(worker, ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS))
        outcomes = simulation.run(generate(workload))
        summary = summarize(outcomes)
        in_time = [
            o.finished and (o.first_token_latency_s or math.inf) <= FIRST_TOKEN_S for o in outcomes
        ]
        figures |= {
            f"S2 at {share}: attainment": statistics.fmean(in_time),
            f"S2 at {share}: throughput": summary.requests_per_s,
            f"S2 at {share}: mean first token": summary.first_token.mean_s,
        }
    return figures


def measure(loop: str, num_seeds: int) -> Figures:
    """All figures without one loop, as means over seeds; a lost polite request counts as NaN."""
    for target, name, value in LOOPS[loop]:
        patch.object(target, name, value).start()
    figures: Figures = {}
    for scenario in (overloaded, fast, cold, fetched, paper):
        try:
            found = [scenario(seed) for seed in range(num_seeds)]
        except AssertionError:
            continue
        figures |= {key: statistics.fmean(each[key] for each in found) for key in found[0]}
    return figures


def main() -> None:
    """Print the table and write the results."""
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="loops whose names contain this")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    loops = [name for name in LOOPS if name == "none" or args.only in name]
    without: dict[str, Figures] = {}
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = zip(loops, pool.map(measure, loops, [args.seeds] * len(loops)), strict=True)
        _, with_all = next(found)
        for loop, figures in found:
            without[loop] = figures
            ratios = {key: figures.get(key, math.nan) / value for key, value in with_all.items()}
            changed = (f"{k} {v:.2f}" for k, v in ratios.items() if not abs(v - 1) <= 0.03)
            print(f"without {loop}:", ", ".join(changed) or "-", flush=True)
    print_table(("FIGURE", "WITH ALL"), [[key, f"{value:.3f}"] for key, value in with_all.items()])
    results = {"simulated": True, "with_all": with_all, "without": without}
    write_results("control_loops", results)


if __name__ == "__main__":
    main()
