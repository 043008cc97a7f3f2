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

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import write_results
from loraplex.cli.output import print_table
from loraplex_services.worker.adapters.pack.contents import base_geometry, read_adapter
from loraplex_services.worker.adapters.pack.site_plan import ItemBytes, plan_sites
from loraplex_services.worker.adapters.pack.tiles import TileLayout
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_layout import plan_kv_groups
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.layers.operators import TorchOperators
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
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "q, v": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "every linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
BASES: dict[str, dict[str, int]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "Llama-3.2-1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama-2-7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True)
class Adapter:
    """Sizes of one adapter."""

    num_bytes: int
    """Of its values."""
    num_pages: int
    num_blocks: int
    """That it would fill alone."""


class NoWeights:
    """Shapes of a base in float16, and nothing else."""

    def has(self, name: str) -> bool:
        """No optional tensor is there."""
        return False

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor without memory; the embedding's device is where the ropes are computed."""
        if "embed_tokens" in name:
            return torch.zeros(1, dtype=torch.float16).expand(tuple(shape))
        return torch.empty(tuple(shape), dtype=torch.float16, device="meta")

    def take_codes(self, name: str, shape: Sequence[int]) -> None:
        """Nothing is quantised."""

    def finish(self) -> None:
        """Nothing is left over."""


def write_base(folder: Path, base: str) -> None:
    """Only its config."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    numbers = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **BASES[base]}
    (folder / "config.json").write_text(json.dumps({**config, **numbers}))


def write_adapter(folder: Path, base: str, targets: Sequence[str], rank: int) -> None:
    """A float16 file of the right length with a header and no values."""
    folder.mkdir()
    sizes = BASES[base]
    hidden, width = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    outputs = {"k_proj": kv, "v_proj": kv, "gate_proj": width, "up_proj": width}
    header: dict[str, Any] = {}
    end = 0
    for layer in range(sizes["num_hidden_layers"]):
        for name in targets:
            part = "self_attn" if name in ATTENTION else "mlp"
            module = f"base_model.model.model.layers.{layer}.{part}.{name}"
            num_in = width if name == "down_proj" else hidden
            for half, shape in (("A", [rank, num_in]), ("B", [outputs.get(name, hidden), rank])):
                begin, end = end, end + HALF_BYTES * shape[0] * shape[1]
                tensor = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
                header[f"{module}.lora_{half}.weight"] = tensor
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapters(
    root: Path, base: str, targets: Sequence[str], ranks: Sequence[int]
) -> tuple[int, list[Adapter]]:
    """Bytes of a block, and the adapter of each rank."""
    write_base(root / "base", base)
    family, config = read_model_config(root / "base")
    sites = family.build(config, NoWeights(), TorchOperators()).site_weights.table
    groups = plan_kv_groups(config.windows, config.kv_heads, HALF_BYTES)
    geometry = base_geometry(root / "base", config, sites)
    made = []
    for rank in ranks:
        write_adapter(root / f"rank-{rank}", base, targets, rank)
        modules = read_adapter(root / f"rank-{rank}", geometry, sites, max(ranks)).modules
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
    """Print the table and write `results/<machine>/arena_waste.json`."""
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
    print(f"wrote {write_results('arena_waste', {'runs': runs})}")


if __name__ == "__main__":
    main()
