"""Share of arena blocks that adapters leave empty, by rank: arithmetic, no weights.

    python -m benchmarks run scheduling.arena_waste

Adapters of ranks 8, 16, 32 and 64 for Llama-2-7B and Llama-3-8B, on the attention projections (as
in the S-LoRA paper) and on every linear, are laid out as the worker's packer does it, from headers
of files without values. Prints the share of their blocks that no value fills, for each rank and for
all four together, and what slots of the largest rank for every adapter would waste.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import write_results
from loraplex.cli.output import print_table
from loraplex_services.worker.adapters.pack.contents import ModuleReader, base_geometry
from loraplex_services.worker.adapters.pack.site_plan import ItemBytes, plan_sites
from loraplex_services.worker.adapters.pack.tiles import TileLayout
from loraplex_services.worker.cache.kv_layout import plan_kv_groups
from loraplex_services.worker.layers.operators import TorchOperators
from loraplex_services.worker.model.families import read_model_config

HALF_BYTES = 2
RANKS = (8, 16, 32, 64)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "attention": ATTENTION,
    "every linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
BASES: dict[str, dict[str, int]] = {
    "Llama-2-7B": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": 32,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
}
SHARED = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


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
    numbers = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **SHARED, **BASES[base]}
    (folder / "config.json").write_text(json.dumps({**config, **numbers}))


def write_adapter(folder: Path, base: str, targets: Sequence[str], rank: int) -> None:
    """A float16 file of the right length with a header and no values."""
    folder.mkdir()
    hidden, width = SHARED["hidden_size"], BASES[base]["intermediate_size"]
    kv = hidden // SHARED["num_attention_heads"] * BASES[base]["num_key_value_heads"]
    outputs = {"k_proj": kv, "v_proj": kv, "gate_proj": width, "up_proj": width}
    header: dict[str, Any] = {}
    end = 0
    for layer in range(SHARED["num_hidden_layers"]):
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


def filled(
    root: Path, base: str, targets: Sequence[str], ranks: Sequence[int]
) -> list[tuple[int, int]]:
    """For each rank the bytes of an adapter's values, and of the blocks that it holds."""
    write_base(root / "base", base)
    family, config = read_model_config(root / "base")
    sites = family.build(config, NoWeights(), TorchOperators()).site_weights.table
    groups = plan_kv_groups(config.windows, config.kv_heads, HALF_BYTES)
    reader = ModuleReader(base_geometry(root / "base", config, sites), sites, max(ranks))
    sizes = []
    for rank in ranks:
        write_adapter(root / f"rank-{rank}", base, targets, rank)
        modules = reader(root / f"rank-{rank}").modules
        plans = plan_sites(modules, sites, ItemBytes(lambda info, kind: HALF_BYTES, HALF_BYTES), {})
        matrices = [part.matrix for plan in plans for part in plan.parts]
        num_bytes = sum(m.num_rows * m.num_columns * m.itemsize for m in matrices)
        num_blocks = TileLayout(groups.block_bytes).pack(matrices).num_blocks
        sizes.append((num_bytes, num_blocks * groups.block_bytes))
    return sizes


def main() -> None:
    """Print the table and write `results/<machine>/arena_waste.json`."""
    rows, runs = [], []
    for base in BASES:
        for name, targets in TARGETS.items():
            with tempfile.TemporaryDirectory() as root:
                sizes = filled(Path(root), base, targets, RANKS)
            num_bytes, held_bytes = (sum(column) for column in zip(*sizes, strict=True))
            waste = {
                f"rank {r}": 1 - full / held for r, (full, held) in zip(RANKS, sizes, strict=True)
            }
            waste["all four"] = 1 - num_bytes / held_bytes
            waste["slots of rank 64"] = 1 - num_bytes / (len(RANKS) * sizes[-1][0])
            runs.append({"base": base, "targets": name, "waste": waste})
            rows.append([base, name, *(f"{share:.1%}" for share in waste.values())])
    print_table(["BASE", "TARGETS", *(label.upper() for label in waste)], rows)
    print(f"wrote {write_results('arena_waste', {'runs': runs})}")


if __name__ == "__main__":
    main()
