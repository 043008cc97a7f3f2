"""Share of the arena's memory that adapters leave empty, by rank: arithmetic, no weights.

    python -m benchmarks run scheduling.arena_waste

Adapters of ranks 1 to 64 for bases of 135M to 8B, on q and v (PEFT's default for Llama), on the
attention projections (as in the S-LoRA paper) and on every linear, are laid out as the worker's
packer does it, from headers of files without values. Prints for each rank

- the share of their pages that no value fills,
- the share that is empty of all blocks that such adapters are in, as a mean over requests for four
  times as many adapters as fit, while KV cache takes blocks and returns them, and the same for
  adapters of all these ranks together,
- the share that would be empty if every adapter filled whole blocks of its own.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu_model import SHAPES
from benchmarks.llama import (
    ALL_SEVEN,
    ATTENTION,
    LLAMA_2_7B,
    LLAMA_3_8B,
    Shape,
    write_base_config,
    write_hollow_adapter,
)
from benchmarks.machine import write_results
from loraplex.cli.output import print_table
from loraplex_services.worker.adapters.pack.contents import AdapterReader, base_geometry
from loraplex_services.worker.adapters.pack.site_plan import ItemBytes, plan_sites
from loraplex_services.worker.adapters.pack.tiles import TileLayout
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_layout import plan_kv_groups
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.types.extents import count_pages_per_block
from loraplex_services.worker.types.residency import Load

HALF_BYTES = 2
RANKS = (1, 2, 4, 8, 16, 64)
NUM_ARENA_BLOCKS = 100
NUM_REQUESTS = 4000
SAMPLE_EVERY = 25
KV_EVERY = 10
"""Requests for each block that KV cache takes or returns."""
KV_OWNER = "kv"
TARGETS = {"q, v": ("q_proj", "v_proj"), "attention": ATTENTION, "every linear": ALL_SEVEN}
BASES = {
    "135M": SHAPES["135m"],
    "Llama-3.2-1B": Shape("llama-3.2-1b", 128256, 2048, 8192, 16, 32, 8),
    "Llama-2-7B": LLAMA_2_7B,
    "Llama-3-8B": LLAMA_3_8B,
}


@dataclass(frozen=True)
class Adapter:
    """Sizes of one adapter."""

    num_bytes: int
    """The size of its values in bytes."""
    num_pages: int
    num_blocks: int
    """That it would fill alone."""


class NoWeights:
    """Shapes of a base in float16, and nothing else."""

    dtype = torch.float16

    def has(self, name: str) -> bool:
        """No optional tensor is there."""
        return False

    def half_dtype(self, name: str) -> None:
        """There are no files."""

    def take(
        self, name: str, shape: Sequence[int], window: None = None, dtype: None = None
    ) -> Tensor:
        """A tensor without memory; the embedding's device is where the ropes are computed."""
        if "embed_tokens" in name:
            return torch.zeros(1, dtype=torch.float16).expand(tuple(shape))
        return torch.empty(tuple(shape), dtype=torch.float16, device="meta")

    def take_codes(self, name: str, shape: Sequence[int]) -> None:
        """Nothing is quantised."""

    def finish(self) -> None:
        """Nothing is left over."""


def adapters(
    root: Path, base: str, targets: Sequence[str], ranks: Sequence[int]
) -> tuple[int, list[Adapter]]:
    """Bytes of a block, and the adapter of each rank."""
    shape = BASES[base]
    write_base_config(shape, root / "base", 4096)
    family, config = read_model_config(root / "base")
    sites = family.build(config, NoWeights(), Operators()).site_weights.table
    groups = plan_kv_groups(config.windows, config.kv_heads, HALF_BYTES)
    geometry = base_geometry(root / "base", config, sites)
    made = []
    for rank in ranks:
        folder = root / f"rank-{rank}"
        write_hollow_adapter(shape, folder, rank, "F16", targets)
        modules = AdapterReader(geometry, sites, max(ranks)).read(folder).modules
        plans = plan_sites(modules, sites, ItemBytes(lambda info, kind: HALF_BYTES, HALF_BYTES), {})
        matrices = [part.matrix for plan in plans for part in plan.parts]
        num_bytes = sum(m.num_rows * m.num_columns * m.itemsize for m in matrices)
        num_pages = TileLayout(groups.block_bytes).pack(matrices).num_pages
        num_blocks = -(-num_pages // count_pages_per_block(groups.block_bytes))
        made.append(Adapter(num_bytes, num_pages, num_blocks))
    return groups.block_bytes, made


def left_empty(adapters: Sequence[Adapter], block_bytes: int) -> float:
    """Share that is empty of the blocks that adapters of these sizes are in: the mean over the
    second half of requests for many of them, while KV cache takes and returns blocks."""
    rng = random.Random(adapters[0].num_pages)
    pages_per_block = count_pages_per_block(block_bytes)
    arena = Arena(max(NUM_ARENA_BLOCKS, 20 * adapters[-1].num_blocks), pages_per_block)
    reclaimer = Reclaimer(arena)
    mean_pages = statistics.fmean(adapter.num_pages for adapter in adapters)
    num_adapters = int(4 * arena.num_blocks * pages_per_block / mean_pages)
    limits = AdapterLimits(num_adapters, arena.num_blocks, max_pinned_blocks=0)
    cache = AdapterCache(arena, reclaimer, limits)
    made = [adapters[number % len(adapters)] for number in range(num_adapters)]
    for number, adapter in enumerate(made):
        cache.fetched(str(number), Path("/"), adapter.num_pages, max_rank=64)
    kv: list[int] = []
    shares = []
    num_requests = max(NUM_REQUESTS, 2 * num_adapters)
    for number in range(num_requests):
        digest, now = str(int(num_adapters * rng.random() ** 3)), number / 20
        cache.load([digest], (), now)
        for action in cache.take_actions():
            if isinstance(action, Load):
                cache.loaded(action.digest)
        cache.acquire([digest], now)
        cache.release([digest], now)
        if number % KV_EVERY == 0:
            if kv and rng.random() < 0.5:
                arena.free(KV_OWNER, [kv.pop(rng.randrange(len(kv)))])
            elif len(kv) < arena.num_blocks // 4 and reclaimer.reclaim(1, now):
                kv += arena.allocate(KV_OWNER, 1)
        if number % SAMPLE_EVERY == 0 and number >= num_requests // 2:
            held = (made[int(a.digest)] for a in cache.adapters() if a.first_pages)
            num_blocks = arena.num_blocks - arena.num_free - len(kv)
            shares.append(1 - sum(a.num_bytes for a in held) / (num_blocks * block_bytes))
    return statistics.fmean(shares)


def main() -> None:
    """Print the table and write `results/simulated/arena_waste.json`."""
    rows, runs = [], []
    for base in BASES:
        for name, targets in TARGETS.items():
            with tempfile.TemporaryDirectory() as root:
                block_bytes, sizes = adapters(Path(root), base, targets, RANKS)
            page_bytes = block_bytes // count_pages_per_block(block_bytes)
            waste = {
                "pages": [1 - a.num_bytes / (a.num_pages * page_bytes) for a in sizes],
                "shared blocks": [left_empty([a], block_bytes) for a in sizes],
                "whole blocks": [1 - a.num_bytes / (a.num_blocks * block_bytes) for a in sizes],
            }
            waste["shared blocks"].append(left_empty(sizes, block_bytes))
            runs.append({"base": base, "targets": name, "ranks": RANKS, "waste": waste})
            rows += [
                [
                    base,
                    name,
                    kind,
                    *(f"{s:.1%}" for s in shares),
                    *[""] * (1 + len(RANKS) - len(shares)),
                ]
                for kind, shares in waste.items()
            ]
    print_table(["BASE", "TARGETS", "EMPTY OF", *(f"RANK {rank}" for rank in RANKS), "ALL"], rows)
    write_results("arena_waste", {"simulated": True, "runs": runs})


if __name__ == "__main__":
    main()
