"""Simulated: first tokens in time under overload, giving up early beside first come, first served.

    python -m benchmarks.early_abort [--loads 0.5,0.8,1,1.5,2] [--seeds 3]

S-LoRA's S2 (200 adapters of ranks 64, 32, 16 and 8, lengths U[8,512]) on one worker at the roofline
costs of `slora_policies`, with the worker's own scheduler. Capacity is measured first, then
requests arrive at shares of it (Poisson, and in bursts: cv 8) and want their first token within
6 s. Printed: the share that has it, with early abort and without, beside the most that could,
min(1, 1 / load).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.machine import write_results
from benchmarks.slora_policies import NUM_ADAPTERS, capacity_per_s, fleet
from loraplex.cli.output import print_table
from loraplex.workload import RANK_MIXES, Workload, generate, ranks_of, summarize
from services.simulate.simulation import Simulation

SLO_S = 6.0
RANKS = ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS)


def attainments(workload: Workload) -> tuple[float, float]:
    """With early abort, and first come, first served without it."""
    trace = generate(workload)
    with_abort, without = (
        summarize(Simulation(fleet("fcfs", None, first_token_s), RANKS).run(trace), SLO_S)
        for first_token_s in (SLO_S, None)
    )
    return with_abort.attainment, without.attainment


def main() -> None:
    """Print the table and write `results/<machine>/early_abort.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", default="0.5,0.8,1,1.5,2")
    parser.add_argument("--cvs", default="1,8")
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    per_s = capacity_per_s(fleet("fcfs", None), NUM_ADAPTERS, RANK_MIXES["S2"])
    print(f"capacity {per_s:.2f} requests/s")
    rows, runs = [], []
    for cv in map(float, args.cvs.split(",")):
        for load in map(float, args.loads.split(",")):
            pairs = [
                attainments(Workload(NUM_ADAPTERS, load * per_s, args.duration, cv=cv, seed=seed))
                for seed in range(args.seeds)
            ]
            with_abort, without = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            most = min(1.0, 1.0 / load)
            run: dict[str, Any] = {
                "cv": cv,
                "load": load,
                "early_abort": with_abort,
                "fcfs": without,
                "most": most,
                "of_most": with_abort / most,
            }
            runs.append(run)
            rows.append([f"{value:.3g}" for value in run.values()])
    print_table(["CV", "LOAD", "EARLY ABORT", "FCFS", "MOST", "OF MOST"], rows)
    results = {"simulated": True, "capacity_per_s": per_s, "slo_s": SLO_S, "runs": runs}
    print(f"wrote {write_results('early_abort', results)}")


if __name__ == "__main__":
    main()
