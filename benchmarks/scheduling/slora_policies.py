"""Simulated: SLO attainment of each scheduling policy on the S-LoRA paper's workload S2.

    python -m benchmarks run scheduling.slora_policies [--duration 120] [--rates 1,1.5,2]
    python -m benchmarks run scheduling.slora_policies --lengths 8-512,1-8 --rates 8,20 --deadline 6

Every policy the engine offers runs the same traces: 200 adapters of ranks 64, 32, 16 and 8, lengths
U[8,512], one worker. Costs are a roofline of a 7B base in float16 on a 24 GB GPU with 600 GB/s, not
a measurement; only the order of the policies, and ratios inside one table, mean something.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.machine import write_results
from loraplex.cli.output import print_table
from loraplex.cli.workload_flags import parse_lengths
from loraplex.workload import RANK_MIXES, Arrivals, Summary, Workload, generate, ranks_of, summarize
from loraplex_services.simulate.rooflines import ROOFLINES
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.scheduling.policies import POLICIES
from loraplex_services.worker.types.messages import EngineConfig

COSTS = ROOFLINES["llama-7b@a10g"].costs
BLOCK_BYTES = COSTS.block_bytes
ARENA_BYTES = 8 << 30
NUM_ADAPTERS = 200


def fleet(
    policy: str, deadline_s: float | None, first_token_s: float | None = None
) -> SimulatedFleet:
    """One worker whose host memory holds every adapter."""
    engine = EngineConfig(
        model_dir="",
        device="simulated",
        dtype="float16",
        arena_bytes=ARENA_BYTES,
        max_lora_rank=64,
        max_resident=1024,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        policy=policy,
    )
    return SimulatedFleet(
        COSTS, engine, on_disk=True, deadline_s=deadline_s, first_token_s=first_token_s
    )


class Capacity(NamedTuple):
    """Of one worker while far more requests wait than run."""

    per_s: float
    """Requests served in a second."""
    num_running: float
    """Requests in the batch, by Little's law."""


def capacity(fleet_: SimulatedFleet, num_adapters: int, mix: Sequence[int]) -> Capacity:
    """For requests of U[8,512] tokens in and out."""
    trace = generate(Workload(num_adapters, 1000.0, 1.0))
    simulation = Simulation(fleet_, ranks_of(mix, num_adapters))
    by_end = sorted(simulation.run(trace), key=lambda outcome: outcome.end_s)
    tenth = len(by_end) // 10  # filling and emptying the batch are left out
    middle = by_end[tenth : 9 * tenth]
    per_s = len(middle) / (by_end[9 * tenth].end_s - by_end[tenth].end_s)
    stays_s = [outcome.end_s - (outcome.first_token_s or 0.0) for outcome in middle]
    return Capacity(per_s, per_s * statistics.fmean(stays_s))


def measure(
    policy: str,
    workload: Workload,
    deadline_s: float | None = None,
    first_token_s: float | None = None,
    mix: str = "S2",
) -> tuple[Summary, int]:
    """One run, and how many adapters it copied to the device."""
    ranks = ranks_of(RANK_MIXES[mix], workload.num_adapters)
    simulation = Simulation(fleet(policy, deadline_s, first_token_s), ranks)
    summary = summarize(simulation.run(generate(workload)))
    return summary, simulation.tally.loads


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--duration", type=float, default=120.0)
    parser.add_argument("--rates", default="1,1.5,2")
    parser.add_argument("--cvs", default="1,8")
    parser.add_argument("--lengths", default="8-512,8-512")
    parser.add_argument(
        "--deadline", type=float, help="of each request: what cannot keep it is given up early"
    )
    parser.add_argument(
        "--first-token", type=float, help="what cannot have its first token within it is given up"
    )
    parser.add_argument("--mix", default="S2", choices=sorted(RANK_MIXES), help="of ranks (S2)")
    args = parser.parse_args()
    rows: list[list[str]] = []
    runs: list[dict[str, Any]] = []
    for cv in map(float, args.cvs.split(",")):
        for rate in map(float, args.rates.split(",")):
            lengths = parse_lengths(args.lengths)
            workload = Workload(
                NUM_ADAPTERS, rate, args.duration, cv, lengths=lengths, arrivals=Arrivals.POOLED
            )
            for policy in sorted(POLICIES):
                summary, loads = measure(
                    policy, workload, args.deadline, args.first_token, args.mix
                )
                rows.append(
                    [
                        f"{cv:g}",
                        f"{rate:g}",
                        policy,
                        f"{summary.requests_per_s:.2f}",
                        f"{summary.first_token.p50_s:.2f}",
                        f"{summary.attainment:.3f}",
                        f"{summary.satisfaction:.3f}",
                        str(loads),
                    ]
                )
                setting = {"cv": cv, "rate_per_s": rate, "policy": policy, "loads": loads}
                runs.append({**setting, **dataclasses.asdict(summary)})
    print("simulated, S2, 200 adapters, one worker of 24 GB")
    print_table(
        ("CV", "RATE", "POLICY", "REQ/S", "FIRST TOKEN P50 (s)", "ATTAINED", "SATISFIED", "LOADS"),
        rows,
    )
    costs = dataclasses.asdict(COSTS)
    name = "slora_policies" if args.deadline is None else "slora_policies_deadline"
    print(write_results(name, {"simulated": True, "costs": costs, "runs": runs}))


if __name__ == "__main__":
    main()
