"""Costs from a roofline: Llama bases in float16 on the two GPUs of the S-LoRA paper.

A step reads the weights, the cache and the distinct adapters once, at the memory's rate, and
computes its tokens at the rate of large products. Only the order of settings and ratios within one
model are meaningful.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.flags import ROOFLINE_NAMES

TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Base:
    """A base in float16, with multi-head attention."""

    weight_bytes: float
    num_layers: int
    hidden_size: int

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of a position."""
        return 2 * 2 * self.num_layers * self.hidden_size

    @property
    def adapter_bytes_per_rank(self) -> int:
        """A and B on the four projections of the attention."""
        return 4 * 2 * 2 * self.num_layers * self.hidden_size


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with its nominal rates, and about how much of them is reached."""

    read_bytes_per_s: float
    flops: float
    copy_bytes_per_s: float
    """Bandwidth of copies from the host."""
    memory_bytes: float
    """Memory for weights, cache and adapters."""


BASES = {
    "llama-7b": Base(13.5e9, 32, 4096),
    "llama-13b": Base(26e9, 40, 5120),
}
GPUS = {
    "a10g": Gpu(500e9, 60e12, 12e9, 22.1e9),
    "a100-80g": Gpu(1600e9, 200e12, 20e9, 74e9),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A base on a GPU."""

    costs: Costs
    arena_bytes: int
    """The memory that the weights leave free."""


def roofline(base: Base, gpu: Gpu) -> Roofline:
    """The costs of `base` on `gpu`."""
    costs = Costs(
        step_s=base.weight_bytes / gpu.read_bytes_per_s,
        row_s=2e-5,
        token_s=base.weight_bytes / gpu.flops,
        kv_token_s=base.kv_token_bytes / gpu.read_bytes_per_s,
        adapter_byte_s=1 / gpu.read_bytes_per_s,
        load_byte_s=1 / gpu.copy_bytes_per_s,
        request_s=0.005,
        request_p90_s=0.005,
        adapter_bytes_per_rank=base.adapter_bytes_per_rank,
        block_bytes=TOKENS_PER_BLOCK * base.kv_token_bytes,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    return Roofline(costs, int(gpu.memory_bytes - base.weight_bytes))


ROOFLINES: Mapping[str, Roofline] = MappingProxyType(
    {
        name: roofline(BASES[base], GPUS[gpu])
        for name in ROOFLINE_NAMES
        for base, _, gpu in [name.partition("@")]
    }
)
