"""Simulated: what each scheduling policy does to attainment on S-LoRA's S2 workload.

    python -m benchmarks.slora_policies [--duration 120] [--rates 1,1.5,2] [--cvs 1,8]
    python -m benchmarks.slora_policies --lengths 8-512,1-8 --rates 8,20 --cvs 1 --deadline 6

Every policy the engine offers runs the same traces: 200 adapters of ranks 64, 32, 16 and 8, lengths
U[8,512], one worker. Costs are a roofline of a 7B base in float16 on a 24 GB GPU with 600 GB/s, not
a measurement; only the order of the policies, and ratios inside one table, mean something.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks.machine import write_results
from loraplex.cli.output import print_table
from loraplex.cli.workload_flags import parse_lengths
from loraplex.workload import RANK_MIXES, Summary, Workload, generate, ranks_of, summarize
from services.simulate.costs import Costs
from services.simulate.simulation import Fleet, Simulation
from services.worker.engine import POLICIES
from services.worker.messages import EngineConfig

GPU_BYTES_PER_S = 500e9
"""Of 600 nominal."""
GPU_FLOPS = 60e12
WEIGHT_BYTES = 13.5e9
KV_TOKEN_BYTES = 512 * 1024
COPY_BYTES_PER_S = 12e9
BLOCK_BYTES = 16 * KV_TOKEN_BYTES
ARENA_BYTES = 8 << 30
NUM_ADAPTERS = 200

COSTS = Costs(
    step_s=WEIGHT_BYTES / GPU_BYTES_PER_S,
    row_s=2e-5,
    token_s=WEIGHT_BYTES / GPU_FLOPS,
    kv_token_s=KV_TOKEN_BYTES / GPU_BYTES_PER_S,
    adapter_byte_s=1 / GPU_BYTES_PER_S,
    load_s=1e-3,
    load_byte_s=1 / COPY_BYTES_PER_S,
    fetch_s=0.0,
    fetch_byte_s=0.0,
    request_s=0.005,
    adapter_bytes_per_rank=2 << 20,
    block_bytes=BLOCK_BYTES,
    tokens_per_block=16,
)


def fleet(policy: str, deadline_s: float | None, first_token_s: float | None = None) -> Fleet:
    """One worker whose host memory holds every adapter."""
    engine = EngineConfig(
        model_dir="",
        device="simulated",
        dtype="float16",
        arena_bytes=ARENA_BYTES,
        load_format="auto",
        max_lora_rank=64,
        max_resident=1024,
        max_step_tokens=2048,
        max_running=256,
        max_loras=None,
        policy=policy,
        first_token_s=first_token_s,
    )
    return Fleet(COSTS, engine, on_disk=True, deadline_s=deadline_s)


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
            workload = Workload(NUM_ADAPTERS, rate, args.duration, cv=cv, lengths=lengths)
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
