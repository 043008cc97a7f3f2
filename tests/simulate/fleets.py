"""Costs and fleets for tests: small, and easy to reckon by hand."""

from __future__ import annotations

from typing import Any

from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.simulation import SimulatedFleet
from loraplex_services.worker.types.messages import EngineConfig
from tests.worker.commands import make_config

COSTS = Costs(
    step_s=0.010,
    idle_s=0.0,
    row_s=0.0,
    many_row_s=0.0,
    prompt_s=0.0,
    token_s=0.001,
    kv_token_s=0.0,
    adapter_byte_s=0.0,
    step_spread=0.0,
    load_s=0.005,
    load_byte_s=0.0,
    fetch_s=0.100,
    fetch_byte_s=0.0,
    request_s=0.0,
    request_p90_s=0.0,
    adapter_bytes_per_rank=1024.0,
    block_bytes=16384,
    tokens_per_block=16,
    repeat_begin=0.0,
    repeat_end=0.0,
)


def engine_config(**changes: Any) -> EngineConfig:
    """A worker with an arena of 4096 blocks."""
    fields: dict[str, Any] = {
        "device": "simulated",
        "arena_bytes": 4096 * COSTS.block_bytes,
        "max_lora_rank": 256,
        "max_resident": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
    }
    return make_config(**{**fields, **changes})


def fleet(**changes: Any) -> SimulatedFleet:
    """One worker with nothing on disk."""
    return SimulatedFleet(**{"costs": COSTS, "engine": engine_config(), **changes})
