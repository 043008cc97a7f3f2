"""Simulated: first tokens in time under overload, with early abort and without.

    python -m benchmarks run scheduling.early_abort [--loads 0.5,0.8,1,1.5,2] [--seeds 3]

S-LoRA's S2 (200 adapters of ranks 64, 32, 16 and 8, lengths U[8,512]) on one worker at the roofline
costs of `slora_worker`, with the worker's own scheduler. The capacity is measured first. Then
requests arrive at shares of it (one process for all adapters; Poisson, and in bursts with cv 8) and
want their first token within 6 s. Prints the share that gets it, with early abort and without;
min(1, 1 / load), which is the upper bound for a trace without end or bursts; an upper bound for
this trace, `most_in_time`; and what a scheduler reaches that knows all arrivals,
`clairvoyant_in_time`.
"""

from __future__ import annotations

import dataclasses
import heapq
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import NUM_ADAPTERS, Capacity, capacity, fleet
from loraplex.cli.output import print_table
from loraplex.workload import (
    RANK_MIXES,
    Arrivals,
    TracedRequest,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from loraplex_services.simulate.simulation import Simulation

SLO_S = 6.0
RANKS = ranks_of(RANK_MIXES["S2"], NUM_ADAPTERS)


def most_in_time(arrivals_s: Sequence[float], most: Capacity) -> float:
    """The share that a scheduler could start in time that knows every arrival, and no length.

    A worker that serves at most `per_s` requests a second and holds `num_running` of them starts
    no more than `num_running + per_s * t` in any t seconds: what it can start fills up at that
    rate while few come. All requests alike, first come, first served without those that are too
    late is then the best there is.
    """
    free, now, num_served = most.num_running, 0.0, 0
    for arrival_s in arrivals_s:
        start_s = max(arrival_s, now + (1.0 - free) / most.per_s)
        if start_s <= arrival_s + SLO_S:
            free = min(most.num_running, free + (start_s - now) * most.per_s) - 1.0
            now = start_s
            num_served += 1
    return num_served / len(arrivals_s)


def clairvoyant_in_time(trace: Sequence[TracedRequest], most: Capacity) -> float:
    """The share that is started in time by a scheduler that knows every arrival, and no length.

    The worker has `most.num_running` slots, loads nothing, and computes one token per slot and
    step; its steps take as long as those of the full batch. The scheduler serves first come, first
    served, without those that would be late. Slots that began together in a burst do not end at a
    constant rate, which is why this is less than `most_in_time`.
    """
    num_output = statistics.fmean(request.num_output for request in trace)
    step_s = most.num_running / most.per_s / num_output
    free_s = [0.0] * round(most.num_running)
    num_served = 0
    for request in trace:
        start_s = max(request.arrival_s, free_s[0])
        if start_s <= request.arrival_s + SLO_S:
            heapq.heapreplace(free_s, start_s + request.num_output * step_s)
            num_served += 1
    return num_served / len(trace)


class Attainment(NamedTuple):
    """Shares of a trace's requests with a first token in time."""

    early_abort: float
    fcfs: float
    """First come, first served, without early abort."""
    clairvoyant: float
    bound: float


def attainments(workload: Workload, most: Capacity) -> Attainment:
    """The shares that are reached and that could be reached, for one trace."""
    trace = generate(workload)
    with_abort, without = (
        summarize(Simulation(fleet(None, first_token_s), RANKS).run(trace), SLO_S)
        for first_token_s in (SLO_S, None)
    )
    bound = most_in_time([request.arrival_s for request in trace], most)
    clairvoyant = clairvoyant_in_time(trace, most)
    return Attainment(with_abort.attainment, without.attainment, clairvoyant, bound)


def main() -> None:
    """Print the table and write `results/simulated/early_abort.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--loads", default="0.5,0.8,1,1.5,2")
    parser.add_argument("--cvs", default="1,8")
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    most = capacity(fleet(), NUM_ADAPTERS, RANK_MIXES["S2"])
    print(f"capacity {most.per_s:.2f} requests/s, {most.num_running:.0f} at once")
    rows, runs = [], []
    for cv in map(float, args.cvs.split(",")):
        for load in map(float, args.loads.split(",")):
            rate = load * most.per_s
            workload = Workload(NUM_ADAPTERS, rate, args.duration, cv=cv, arrivals=Arrivals.POOLED)
            per_seed = [
                attainments(dataclasses.replace(workload, seed=seed), most)
                for seed in range(args.seeds)
            ]
            mean = Attainment(*map(statistics.fmean, zip(*per_seed, strict=True)))
            share = min(1.0, 1.0 / load)
            run: dict[str, Any] = {
                "cv": cv,
                "load": load,
                **mean._asdict(),
                "of_clairvoyant": mean.early_abort / mean.clairvoyant,
                "of_bound": mean.early_abort / mean.bound,
                "most": share,
                "of_most": mean.early_abort / share,
            }
            runs.append(run)
            rows.append([f"{value:.3g}" for value in run.values()])
    print_table([name.upper().replace("_", " ") for name in runs[0]], rows)
    results = {"simulated": True, **most._asdict(), "slo_s": SLO_S, "runs": runs}
    write_results("early_abort", results, args)


if __name__ == "__main__":
    main()
