"""Two gateways before two workers, four tenants, and 200 adapters that no device holds at first."""

from __future__ import annotations

import dataclasses
import heapq
import statistics

from benchmarks.scheduling.slora_worker import NUM_ADAPTERS, capacity, fleet
from loraplex.workload import (
    RANK_MIXES,
    RequestOutcome,
    TracedRequest,
    Workload,
    generate,
    ranks_of,
)
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation

NUM_WORKERS, NUM_GATEWAYS = 2, 2
DEADLINE_S, SLO_S = 60.0, 6.0
SHARES = {"greedy": 10.0, "a": 1.0, "b": 1.0, "c": 1.0}


def cold_adapters(duration_s: float, seed: int) -> dict[str, float]:
    """Simulate twice the capacity, of which one tenant asks for ten shares (roofline costs of
    `slora_worker`).

    Returns the polite tenants' 95th percentile of first tokens that came, the share of their
    requests in time, goodput (requests finished with their first token in time) over the capacity,
    the share in time of the requests that a worker began, and copies of adapters per finished
    request.
    """
    mix = RANK_MIXES["S2"]
    per_s = NUM_WORKERS * capacity(fleet(), NUM_ADAPTERS, mix).per_s
    workers = gateways_before(fleet(DEADLINE_S, SLO_S))
    simulation = Simulation(workers, ranks_of(mix, NUM_ADAPTERS))
    trace = _traffic(per_s, duration_s, seed)
    outcomes = simulation.run(trace)
    polite = [o for r, o in zip(trace, outcomes, strict=True) if r.tenant != "greedy"]
    waits_s = sorted(o.first_token_s - o.arrival_s for o in polite if o.first_token_s is not None)
    begun = [o for o in outcomes if o.first_token_s is not None]
    good = sum(map(_is_in_time, outcomes))
    return {
        "polite_p95_s": waits_s[int(0.95 * len(waits_s))],
        "polite_in_time": statistics.fmean(map(_is_in_time, polite)),
        "goodput_over_capacity": good / trace[-1].arrival_s / per_s,
        "begun_in_time": good / len(begun),
        "copies_per_finished": simulation.tally.loads / sum(o.finished for o in outcomes),
    }


def gateways_before(worker: SimulatedFleet) -> SimulatedFleet:
    """Two gateways before two workers like this one."""
    return dataclasses.replace(
        worker, num_workers=NUM_WORKERS, admission=AdmissionLimits(), num_gateways=NUM_GATEWAYS
    )


def _traffic(per_s: float, duration_s: float, seed: int) -> list[TracedRequest]:
    """The requests of all tenants, by arrival."""
    traces = []
    for number, (tenant, share) in enumerate(SHARES.items()):
        rate = 2.0 * per_s * share / sum(SHARES.values())
        workload = Workload(NUM_ADAPTERS, rate, duration_s, seed=seed * len(SHARES) + number)
        traces.append([dataclasses.replace(each, tenant=tenant) for each in generate(workload)])
    return list(heapq.merge(*traces, key=lambda request: request.arrival_s))


def _is_in_time(outcome: RequestOutcome) -> bool:
    """Finished, and with its first token within the bound."""
    first_s = outcome.first_token_latency_s
    return outcome.finished and first_s is not None and first_s <= SLO_S
