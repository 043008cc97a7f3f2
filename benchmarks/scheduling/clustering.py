"""Simulated: S-LoRA's adapter clustering by the number of adapters that may run at once.

    python -m benchmarks run scheduling.clustering [--rate-shares 1,1.15] [--seeds 4]

32 adapters of ranks 64, 32, 16 and 8 on one worker (roofline costs of `slora_policies`), lengths
U[8,512], first tokens wanted within 6 s, at shares of the capacity, which is measured first. d is
the number of distinct adapters that run before requests for others are passed over; 32 turns it
off. No request is passed over for longer than the age bound, nor while fewer requests wait per
running one than the queue bound says. Prints the share of requests with their first token in time,
and requests per second, as means over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

import msgspec

from benchmarks.machine import write_results
from benchmarks.scheduling.slora_policies import capacity, fleet
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Summary, Workload, generate, ranks_of, summarize
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.engine.engine import CLUSTERED_AGE_S, CLUSTERED_MIN_QUEUE, POLICIES
from loraplex_services.worker.scheduling.policies import Policy, ServiceCounters, clustered

NUM_ADAPTERS = 32


def policy(max_distinct: int, min_queue: float, counters: ServiceCounters) -> Policy:
    """Of the engine's table."""
    return clustered(max_distinct, CLUSTERED_AGE_S, min_queue)


def floats(text: str) -> list[float]:
    """Of a list with commas."""
    return [float(part) for part in text.split(",")]


def measure(fleet_: SimulatedFleet, mix: str, workload: Workload) -> Summary:
    """One run."""
    ranks = ranks_of(RANK_MIXES[mix], NUM_ADAPTERS)
    return summarize(Simulation(fleet_, ranks).run(generate(workload)))


def main() -> None:
    """Print the table and write `results/<machine>/clustering.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mix", choices=sorted(RANK_MIXES), default="S2")
    parser.add_argument("--distinct", default="8,32")
    parser.add_argument("--rate-shares", default="1,1.15")
    parser.add_argument("--duration", type=float, default=150.0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--queues", default=f"0,{CLUSTERED_MIN_QUEUE:g}", help="bounds")
    args = parser.parse_args()
    base = fleet("fcfs", None)
    per_s = capacity(base, NUM_ADAPTERS, RANK_MIXES[args.mix]).per_s
    print(f"capacity {per_s:.2f} requests/s")
    rows, runs = [], []
    for min_queue, share in itertools.product(
        *(floats(text) for text in (args.queues, args.rate_shares))
    ):
        for distinct in map(int, args.distinct.split(",")):
            name = f"clustered-{distinct}"
            POLICIES[name] = partial(policy, distinct, min_queue)
            own = msgspec.structs.replace(base.engine, policy=name)
            summaries = [
                measure(
                    SimulatedFleet(base.costs, own, on_disk=True),
                    args.mix,
                    Workload(NUM_ADAPTERS, share * per_s, args.duration, seed=seed),
                )
                for seed in range(args.seeds)
            ]
            run: dict[str, Any] = {
                "min_queue": min_queue,
                "rate_share": share,
                "distinct": distinct,
                "attainment": statistics.fmean(s.attainment for s in summaries),
                "satisfaction": statistics.fmean(s.satisfaction for s in summaries),
                "requests_per_s": statistics.fmean(s.requests_per_s for s in summaries),
            }
            runs.append(run)
            numbers = [f"{run[k]:.3f}" for k in ("requests_per_s", "attainment", "satisfaction")]
            rows.append([f"{min_queue:g}", f"{share:g}", str(distinct), *numbers])
    print_table(["QUEUE BOUND", "RATE / CAPACITY", "D", "REQ/S", "ATTAINED", "SATISFIED"], rows)
    results = {"simulated": True, "capacity_per_s": per_s, "runs": runs}
    print(f"wrote {write_results('clustering', results)}")


if __name__ == "__main__":
    main()
