"""Simulated: the waiting queue at gateways, at workers, and at both.

    python -m benchmarks run scheduling.queue_owner [--seeds 3]

Two gateways before two workers (roofline costs of `slora_policies`), four tenants, of which one
asks for ten shares; together twice the capacity. 200 adapters, none on a device at first. Each
request has 60 s, and wants its first token within 6 s. Compared are (a) gateways keep a fair queue
and workers run first come, first served; (b) gateways only bound what is in flight, and workers
keep a fair queue; and (both) fair queues at both, as served today. Prints the polite tenants' 95th
percentile of first tokens that came, the share of their requests in time, goodput (requests
finished with their first token in time) over the capacity, the share in time of the requests that a
worker began, and copies of adapters per finished request. A second table has the figures of
`scheduling.overload`, where all adapters are the base's and each whole answer has a deadline.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import statistics
from typing import Any

import msgspec

from benchmarks.machine import write_results
from benchmarks.scheduling.overload import BOTH, Owner, fairness, overload
from benchmarks.scheduling.overload import capacity as batch_capacity
from benchmarks.scheduling.slora_policies import NUM_ADAPTERS, capacity, fleet
from loraplex.cli.output import print_table
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
OWNERS = {"(a) gateways": Owner("fcfs"), "(b) workers": Owner("fair", False), "both": BOTH}


def traffic(per_s: float, duration_s: float, seed: int) -> list[TracedRequest]:
    """Of all tenants, by arrival."""
    traces = [
        [
            dataclasses.replace(request, tenant=tenant)
            for request in generate(
                Workload(
                    NUM_ADAPTERS,
                    2.0 * per_s * share / sum(SHARES.values()),
                    duration_s,
                    seed=seed * len(SHARES) + number,
                )
            )
        ]
        for number, (tenant, share) in enumerate(SHARES.items())
    ]
    return list(heapq.merge(*traces, key=lambda request: request.arrival_s))


def is_in_time(outcome: RequestOutcome) -> bool:
    """Finished, and with its first token within the bound."""
    first_s = outcome.first_token_latency_s
    return outcome.finished and first_s is not None and first_s <= SLO_S


def measure(fleet_: SimulatedFleet, trace: list[TracedRequest], per_s: float) -> dict[str, float]:
    """One run."""
    simulation = Simulation(fleet_, ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS))
    outcomes = simulation.run(trace)
    polite = [o for r, o in zip(trace, outcomes, strict=True) if r.tenant != "greedy"]
    waits_s = sorted(o.first_token_s - o.arrival_s for o in polite if o.first_token_s is not None)
    begun = [o for o in outcomes if o.first_token_s is not None]
    good = sum(map(is_in_time, outcomes))
    return {
        "polite_p95_s": waits_s[int(0.95 * len(waits_s))],
        "polite_in_time": statistics.fmean(map(is_in_time, polite)),
        "goodput_over_capacity": good / trace[-1].arrival_s / per_s,
        "begun_in_time": good / len(begun),
        "copies_per_finished": simulation.tally.loads / sum(o.finished for o in outcomes),
    }


def short_answers(owner: Owner, num_seeds: int, seconds: float = 20.0) -> dict[str, float]:
    """The figures of `scheduling.overload`, where a deadline is for the whole answer."""
    per_s = batch_capacity(seconds)
    twice = [overload(seed, seconds, per_s, owner=owner) for seed in range(num_seeds)]
    fair = [fairness(seed, seconds, per_s, owner) for seed in range(num_seeds)]
    return {
        "polite_p95_beside_share_ms": statistics.fmean(f.beside_share_ms for f in fair),
        "polite_p95_beside_ten_ms": statistics.fmean(f.beside_ten_shares_ms for f in fair),
        "goodput_over_capacity": statistics.fmean(t.goodput_over_capacity for t in twice),
        "begun_in_time": statistics.fmean(t.accepted_in_time for t in twice),
    }


def capacity_of_worker() -> float:
    """Requests a second."""
    return capacity(fleet("fcfs", None), NUM_ADAPTERS, RANK_MIXES["S2"]).per_s


def gateways_and_workers(owner: str) -> SimulatedFleet:
    """With the waiting queue where `owner` says."""
    base = fleet("fcfs", DEADLINE_S, SLO_S)
    return dataclasses.replace(
        base,
        engine=msgspec.structs.replace(base.engine, policy=OWNERS[owner].policy),
        num_workers=NUM_WORKERS,
        admission=AdmissionLimits(),
        num_gateways=NUM_GATEWAYS,
        gateways_keep_queue=OWNERS[owner].gateways_keep_queue,
    )


def main() -> None:
    """Print the table and write `results/<machine>/queue_owner.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--duration", type=float, default=240.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    per_s = NUM_WORKERS * capacity_of_worker()
    print(f"capacity {per_s:.2f} requests/s")
    rows: list[list[str]] = []
    short_rows: list[list[str]] = []
    runs: list[dict[str, Any]] = []
    for owner in OWNERS:
        fleet_ = gateways_and_workers(owner)
        found = [
            measure(fleet_, traffic(per_s, args.duration, seed), per_s)
            for seed in range(args.seeds)
        ]
        run = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        short = short_answers(OWNERS[owner], args.seeds)
        runs.append({"owner": owner, **run, "short_answers": short})
        rows.append([owner, *(f"{value:.3f}" for value in run.values())])
        short_rows.append([owner, *(f"{value:.3f}" for value in short.values())])
    head = ("QUEUE AT", "POLITE P95 (s)", "POLITE IN TIME", "GOODPUT", "BEGUN IN TIME")
    print_table((*head, "COPIES / FINISHED"), rows)
    print("short answers with deadlines (scheduling.overload)")
    head = ("QUEUE AT", "POLITE P95, ONE SHARE (ms)", "TEN SHARES (ms)", "GOODPUT", "BEGUN IN TIME")
    print_table(head, short_rows)
    results = {"simulated": True, "capacity_per_s": per_s, "runs": runs}
    print(f"wrote {write_results('queue_owner', results)}")


if __name__ == "__main__":
    main()
