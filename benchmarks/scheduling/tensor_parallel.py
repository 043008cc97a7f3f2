"""Simulated: Figure 8 of the S-LoRA paper, throughput of tensor parallelism with adapters.

    python -m benchmarks run scheduling.tensor_parallel

Llama-30B on 2 and 4 A100 of 40 GB with 10 and 100 adapters, and Llama-70B on 2 and 4 A100 of 80 GB
with 10, by the roofline of `services/simulate/rooflines.py`: ranks divide all reads and products,
and each collective takes `LATENCY_S` and its bytes over NVLink. Both bases have multi-head
attention here. More requests wait than run. Four sides, of which the last two differ in how
adapters on q, k, v and o are divided (decision 13):

- *base*: no adapters,
- *no communication*: S-LoRA's division, as if its collectives took no time,
- *both matrices divided*: S-LoRA's division, `--fully-sharded-loras`, and
- *one matrix divided*: the default, which sends nothing and reads more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.machine import options_of, write_results
from loraplex.cli.output import print_table
from loraplex.workload import Workload, generate, summarize
from loraplex_services.simulate.rooflines import Base, Gpu, Roofline, roofline
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.types.messages import EngineConfig

LATENCY_S = 10e-6
"""The time of one collective among GPUs of a machine, in seconds."""
LINK_BYTES_PER_S = 200e9
"""Bytes per second that a GPU sends over NVLink, of a nominal 300 GB/s."""
BASE_COLLECTIVES, LORA_COLLECTIVES = 2, 2
"""Collectives in each layer: after o and down; for q, k and v together, and for o."""
ITEM_BYTES = 2
SIDES = ("base", "no communication", "both matrices divided", "one matrix divided")


@dataclass(frozen=True, slots=True)
class Case:
    """One group of bars of the figure."""

    name: str
    base: Base
    gpu: Gpu
    rank: int
    num_adapters: int


LLAMA_30B, LLAMA_70B = Base(65e9, 60, 6656), Base(138e9, 80, 8192)
A100_40G = Gpu(1250e9, 200e12, 20e9, 37e9)
A100_80G = Gpu(1600e9, 200e12, 20e9, 74e9)
CASES = (
    Case("Llama-30B, 40 GB, 10 adapters", LLAMA_30B, A100_40G, 32, 10),
    Case("Llama-30B, 40 GB, 100 adapters", LLAMA_30B, A100_40G, 32, 100),
    Case("Llama-70B, 80 GB, 10 adapters", LLAMA_70B, A100_80G, 64, 10),
)


def sharded(case: Case, num_gpus: int, side: str) -> Roofline:
    """The costs of `num_gpus` ranks. An arena's block is divided among them."""
    gpu, base = case.gpu, case.base
    group = Gpu(*(num_gpus * value for value in dataclasses.astuple(gpu)))
    complete = roofline(base, group)
    sent_share = (num_gpus - 1) / num_gpus
    item_s = ITEM_BYTES / LINK_BYTES_PER_S
    num_collectives = BASE_COLLECTIVES
    token_items = 4.0 * sent_share * base.hidden_size
    if side == "both matrices divided":
        num_collectives += LORA_COLLECTIVES
        token_items += 5.0 * sent_share * case.rank
    held = (1 + num_gpus) / 2 if side == "one matrix divided" else 1.0
    costs = dataclasses.replace(
        complete.costs,
        step_s=complete.costs.step_s + base.num_layers * num_collectives * LATENCY_S,
        token_s=complete.costs.token_s + base.num_layers * token_items * item_s,
        adapter_bytes_per_rank=held * complete.costs.adapter_bytes_per_rank,
    )
    return Roofline(costs, complete.arena_bytes)


def throughput(case: Case, num_gpus: int, side: str, rate_per_s: float) -> float:
    """Generated tokens per second while more requests wait than run."""
    cost = sharded(case, num_gpus, side)
    engine = EngineConfig(
        model_dir="",
        device="simulated",
        dtype="float16",
        arena_bytes=cost.arena_bytes,
        max_lora_rank=64,
        max_resident=1024,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
    )
    fleet = SimulatedFleet(cost.costs, engine, on_disk=True, deadline_s=None)
    ranks = [case.rank] * case.num_adapters
    workload = Workload(num_adapters=case.num_adapters, rate_per_s=rate_per_s, duration_s=15.0)
    requests = generate(workload)
    if side == "base":
        requests = [dataclasses.replace(request, adapter=None) for request in requests]
    return summarize(Simulation(fleet, ranks).run(requests), 6.0).output_tokens_per_s


def main() -> None:
    """Print the table and write `results/simulated/tensor_parallel_simulated.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s, above capacity (12)")
    args = parser.parse_args()
    rows, runs = [], []
    for case in CASES:
        for num_gpus in (2, 4):
            tokens = {side: throughput(case, num_gpus, side, args.rate) for side in SIDES}
            runs.append({"case": case.name, "num_gpus": num_gpus, "tokens_per_s": tokens})
            rows.append([case.name, str(num_gpus), *(f"{n:.0f}" for n in tokens.values())])
            print(*rows[-1], flush=True)
    print_table(["TOKENS/S", "GPUS", *SIDES], rows)
    write_results("tensor_parallel_simulated", {"simulated": True, "runs": runs}, args)


if __name__ == "__main__":
    main()
