"""Simulated: slots that are idle for copies of adapters, with prefetching and without.

    python -m benchmarks run scheduling.prefetch [--shares 1,1.2] [--seeds 3]

2,000 adapters of ranks 64, 32, 16 and 8 on one worker, lengths U[8,512], first come, first served,
at shares of the capacity, which is measured first. Two bases at roofline costs: on a 24 GB GPU
memory bounds the batch, and with 16 slots the slots do. Copies come from host memory (12 GB/s) or
from a disk (1 GB/s). Prints, with the adapters of the next K requests loaded ahead (0 = none): the
slot seconds that were idle because an adapter was being copied, over those without prefetching; the
part of them that no prefetching by the queue can avoid, since these requests came while the batch
was not full; the rest over the rest without prefetching; the mean first token; and copies per
request.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from typing import Any

import msgspec

from benchmarks.machine import write_results
from benchmarks.scheduling.slora_worker import capacity, fleet
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Workload, generate, ranks_of, summarize
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.scheduling import lookahead

NUM_ADAPTERS = 2000
COPY_BYTES_PER_S = {"host": 12e9, "disk": 1e9}
NUM_SLOTS = {"slots": 16, "memory": 256}
"""By what bounds the batch."""
IDLE_COLUMNS = ("idle_row_s", "of_idle_without", "new_idle_s", "of_avoidable")
RANKS = ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS)


def setting(bound: str, source: str) -> SimulatedFleet:
    """The worker of `slora_worker` with other slots and copies."""
    base = fleet()
    engine = msgspec.structs.replace(
        base.engine, max_num_seqs=NUM_SLOTS[bound], max_resident=NUM_ADAPTERS
    )
    costs = dataclasses.replace(base.costs, load_byte_s=1 / COPY_BYTES_PER_S[source])
    return dataclasses.replace(base, engine=engine, costs=costs)


def measure(fleet_: SimulatedFleet, workload: Workload) -> dict[str, float]:
    """One run."""
    simulation = Simulation(fleet_, RANKS)
    outcomes = simulation.run(generate(workload))
    summary, tally = summarize(outcomes), simulation.tally
    return {
        "idle_row_s": tally.idle_row_s,
        "new_idle_s": tally.new_idle_s,
        "first_token_mean_s": summary.first_token.mean_s,
        "requests_per_s": summary.requests_per_s,
        "copies_per_request": tally.loads / len(outcomes),
        "preemptions": float(tally.preemptions),
    }


def main() -> None:
    """Print the table and write `results/<machine>/prefetch.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shares", default="1,1.2")
    parser.add_argument("--requests", default="0,1,4,16", help="whose adapters load ahead")
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows: list[list[str]] = []
    runs: list[dict[str, Any]] = []
    for bound, source in itertools.product(NUM_SLOTS, COPY_BYTES_PER_S):
        fleet_ = setting(bound, source)
        per_s = capacity(fleet_, NUM_ADAPTERS, RANK_MIXES["S2"]).per_s
        for share in map(float, args.shares.split(",")):
            idle_s = avoidable_s = 0.0
            for num_requests in map(int, args.requests.split(",")):
                lookahead.NUM_REQUESTS = num_requests
                found = [
                    measure(fleet_, Workload(NUM_ADAPTERS, share * per_s, args.duration, seed=seed))
                    for seed in range(args.seeds)
                ]
                run = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
                idle_s = idle_s or run["idle_row_s"]
                run["of_idle_without"] = run["idle_row_s"] / idle_s if idle_s else 0.0
                rest_s = run["idle_row_s"] - run["new_idle_s"]
                avoidable_s = avoidable_s or rest_s
                run["of_avoidable"] = rest_s / avoidable_s if avoidable_s else 0.0
                setting_ = {"bound": bound, "copies_from": source, "share": share}
                runs.append({**setting_, "lookahead": num_requests, **run})
                rows.append(
                    [bound, source, f"{share:g}", str(num_requests)]
                    + [f"{run[k]:.2f}" for k in IDLE_COLUMNS]
                    + [f"{run['first_token_mean_s']:.3f}", f"{run['copies_per_request']:.2f}"]
                )
    print("simulated, 2,000 adapters, S2, one worker")
    head = ("BOUND", "COPIES FROM", "RATE / CAPACITY", "K", "IDLE (s)", "OF K=0")
    head += ("NEW (s)", "REST OF K=0")
    print_table((*head, "FIRST TOKEN (s)", "COPIES / REQUEST"), rows)
    print(f"wrote {write_results('prefetch', {'simulated': True, 'runs': runs})}")


if __name__ == "__main__":
    main()
