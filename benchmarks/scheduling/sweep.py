"""Simulated: S-LoRA's workload with one of its parameters varied at a time.

    python -m benchmarks run scheduling.sweep --vary n|alpha|rate|cv [--seeds 2]
    python -m benchmarks run scheduling.sweep --vary cv --values 1,8 --sides abort,fcfs,lcfs
    python -m benchmarks run scheduling.sweep --vary rate --adapters 26 --lengths arena --alpha 0.5

As in the paper's section 7.2: 200 adapters of S2 (ranks 64, 32, 16 and 8), uniform popularity, 2
requests/s, cv 1, lengths U[8,512] in and out, 5 minutes; then one of n, alpha, R and cv takes other
values. One worker at the roofline costs of `slora_worker`, where 2 requests/s are a little more
than it can serve; first come, first served (`fcfs`), with early abort (`abort`), newest first
(`lcfs`), and newest first with early abort. `--arrivals pooled` draws arrivals as S-LoRA's released
script does.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import fleet
from loraplex.cli.output import print_table
from loraplex.cli.workload_flags import parse_lengths
from loraplex.workload import (
    RANK_MIXES,
    Arrivals,
    LogNormalLengths,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from loraplex_services.simulate.simulation import Simulation

SLO_S = 6.0
USUAL = Workload(num_adapters=200, rate_per_s=2.0, duration_s=300.0)
VALUES: dict[str, tuple[str, tuple[float, ...]]] = {
    "n": ("num_adapters", (1, 5, 20, 100, 200, 1000, 2000)),
    "alpha": ("alpha", (0.1, 0.3, 0.6, 1.0)),
    "rate": ("rate_per_s", (1.0, 1.5, 2.0, 2.5, 3.0)),
    "cv": ("cv", (1.0, 2.0, 4.0, 6.0, 8.0)),
}
"""The field and its usual values, by the name of the parameter."""
SIDES = {
    "abort": (False, SLO_S),
    "fcfs": (False, None),
    "lcfs": (True, None),
    "lcfs+abort": (True, SLO_S),
}
"""Whether the newest goes first, and time for first tokens after which requests are given up."""


def measure(workload: Workload, side: str) -> dict[str, float]:
    """One run."""
    newest_first, first_token_s = SIDES[side]
    worker = dataclasses.replace(fleet(None, first_token_s), newest_first=newest_first)
    ranks = ranks_of(RANK_MIXES["S2"], workload.num_adapters)
    simulation = Simulation(worker, ranks)
    summary = summarize(simulation.run(generate(workload)), SLO_S)
    return {
        "requests_per_s": summary.requests_per_s,
        "first_token_s": summary.first_token.mean_s,
        "latency_s": summary.latency.mean_s,
        "attainment": summary.attainment,
        "satisfaction": summary.satisfaction,
    }


def main() -> None:
    """Print the table and write `results/simulated/sweep_<parameter>.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--vary", choices=sorted(VALUES), required=True)
    parser.add_argument("--values", help="of that parameter, instead of the usual ones")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--rate", type=float, default=USUAL.rate_per_s, help="(2)")
    parser.add_argument("--adapters", type=int, default=USUAL.num_adapters, help="(200)")
    parser.add_argument("--alpha", type=float, default=USUAL.alpha, help="(1)")
    parser.add_argument("--lengths", type=parse_lengths, default="8-512,8-512", help="or arena")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--duration", type=float, default=USUAL.duration_s)
    parser.add_argument("--arrivals", choices=[*Arrivals], default=Arrivals.PER_ADAPTER)
    args = parser.parse_args()
    name, values = VALUES[args.vary]
    values = tuple(map(float, args.values.split(","))) if args.values else values
    sides = [side.strip() for side in args.sides.split(",")]
    usual = dataclasses.replace(
        USUAL,
        num_adapters=args.adapters,
        rate_per_s=args.rate,
        alpha=args.alpha,
        lengths=args.lengths,
        duration_s=args.duration,
        arrivals=Arrivals(args.arrivals),
    )
    rows, runs = [], []
    for value in values:
        for side in sides:
            change: dict[str, Any] = {name: int(value) if name == "num_adapters" else value}
            found = [
                measure(dataclasses.replace(usual, seed=seed, **change), side)
                for seed in range(args.seeds)
            ]
            means = {key: statistics.fmean(run[key] for run in found) for key in found[0]}
            runs.append({name: value, "side": side, **means})
            rows.append([f"{value:g}", side, *(f"{mean:.3g}" for mean in means.values())])
    print_table(
        [args.vary, "SIDE", "REQ/S", "FIRST (s)", "LATENCY (s)", "ATTAINED", "SATISFIED"],
        rows,
    )
    arena = "_arena" * isinstance(args.lengths, LogNormalLengths)
    write_results(
        f"sweep_{args.vary}{arena}", {"simulated": True, "slo_s": SLO_S, "runs": runs}, args
    )


if __name__ == "__main__":
    main()
