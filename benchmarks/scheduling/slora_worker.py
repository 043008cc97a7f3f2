"""Simulated: the worker of the S-LoRA paper's workload S2, and its capacity.

200 adapters of ranks 64, 32, 16 and 8, lengths U[8,512], one worker. Costs are a roofline of a 7B
base in float16 on a 24 GB GPU with 600 GB/s, not a measurement; only ratios inside one table mean
something.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.workload import Workload, generate, ranks_of
from loraplex_services.simulate.rooflines import ROOFLINES
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.types.messages import EngineConfig

COSTS = ROOFLINES["llama-7b@a10g"].costs
BLOCK_BYTES = COSTS.block_bytes
ARENA_BYTES = 8 << 30
NUM_ADAPTERS = 200


def fleet(deadline_s: float | None = None, first_token_s: float | None = None) -> SimulatedFleet:
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
    )
    return SimulatedFleet(
        COSTS, engine, on_disk=True, deadline_s=deadline_s, first_token_s=first_token_s
    )


class Capacity(NamedTuple):
    """The capacity of one worker, while far more requests wait than run."""

    per_s: float
    """Requests served in a second."""
    num_running: float
    """Requests in the batch, by Little's law."""


def capacity(fleet_: SimulatedFleet, num_adapters: int, mix: Sequence[int]) -> Capacity:
    """Measure the capacity for requests of U[8,512] tokens in and out."""
    trace = generate(Workload(num_adapters, 1000.0, 1.0))
    simulation = Simulation(fleet_, ranks_of(mix, num_adapters))
    by_end = sorted(simulation.run(trace), key=lambda outcome: outcome.end_s)
    tenth = len(by_end) // 10  # filling and emptying the batch are left out
    middle = by_end[tenth : 9 * tenth]
    per_s = len(middle) / (by_end[9 * tenth].end_s - by_end[tenth].end_s)
    stays_s = [outcome.end_s - (outcome.first_token_s or 0.0) for outcome in middle]
    return Capacity(per_s, per_s * statistics.fmean(stays_s))
