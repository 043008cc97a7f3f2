"""Simulated: S-LoRA's adapter clustering by the cluster size (appendix A of the paper).

    python -m benchmarks run scheduling.clustering [--rate-shares 1,1.15] [--seeds 4]

32 adapters of ranks 64, 32, 16 and 8 on one worker (roofline costs of `slora_worker`), lengths
U[8,512], first tokens wanted within 6 s, at shares of the capacity, which is measured first without
clustering. d is the number of adapters that run before requests for others are passed over; 0 turns
clustering off. Prints requests per second, the mean latency, the mean and the longest first token,
and the share of requests with their first token in time, as means over seeds.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import msgspec

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import capacity, fleet
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Workload, generate, ranks_of, summarize
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation

NUM_ADAPTERS = 32


def measure(fleet_: SimulatedFleet, mix: str, workload: Workload) -> dict[str, float]:
    """One run."""
    outcomes = Simulation(fleet_, ranks_of(RANK_MIXES[mix], NUM_ADAPTERS)).run(generate(workload))
    summary = summarize(outcomes)
    first_s = [outcome.first_token_latency_s for outcome in outcomes]
    return {
        "requests_per_s": summary.requests_per_s,
        "latency_mean_s": statistics.fmean(o.end_s - o.arrival_s for o in outcomes),
        "first_token_mean_s": summary.first_token.mean_s,
        "first_token_max_s": max(s for s in first_s if s is not None),
        "attainment": summary.attainment,
        "satisfaction": summary.satisfaction,
    }


def main() -> None:
    """Print the table and write `results/simulated/clustering.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--mix", choices=sorted(RANK_MIXES), default="S2")
    parser.add_argument("--sizes", default="0,1,2,4,8,16,32", help="values of d")
    parser.add_argument("--rate-shares", default="1,1.15")
    parser.add_argument("--duration", type=float, default=150.0)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    base = fleet()
    per_s = capacity(base, NUM_ADAPTERS, RANK_MIXES[args.mix]).per_s
    print(f"capacity {per_s:.2f} requests/s")
    rows: list[list[str]] = []
    runs: list[dict[str, Any]] = []
    shares = map(float, args.rate_shares.split(","))
    sizes = map(int, args.sizes.split(","))
    for share, size in itertools.product(shares, sizes):
        own = msgspec.structs.replace(base.engine, cluster_size=size)
        found = [
            measure(
                SimulatedFleet(base.costs, own, on_disk=True),
                args.mix,
                Workload(NUM_ADAPTERS, share * per_s, args.duration, seed=seed),
            )
            for seed in range(args.seeds)
        ]
        run = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        runs.append({"rate_share": share, "cluster_size": size, **run})
        numbers = [f"{value:.3g}" for value in run.values()]
        rows.append([f"{share:g}", str(size or "off"), *numbers])
    head = ("RATE / CAPACITY", "D", "REQ/S", "LATENCY (s)", "FIRST TOKEN (s)")
    print_table((*head, "LONGEST (s)", "ATTAINED", "SATISFIED"), rows)
    results = {"simulated": True, "capacity_per_s": per_s, "runs": runs}
    name = "clustering" if args.mix == "S2" else f"clustering_{args.mix.lower()}"
    write_results(name, results, args)


if __name__ == "__main__":
    main()
