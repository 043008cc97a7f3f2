"""The low-rank update alone, 32 rows: C++ and torch against the bytes that must move.

    python -m benchmarks run cpu.lora_ops

Tiles rotate over more memory than caches hold, as the layers of a model do in a decode step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.cpu.limits import best_s, measure_limits
from benchmarks.cpu_model import dtype_of, rank_of
from benchmarks.machine import write_results
from loraplex_services.worker.layers.operators import AddLora
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.cpu import NativeLora
from loraplex_services.worker.ops.lora.cpu_records import Records
from loraplex_services.worker.ops.lora.runs import row_runs
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch

NUM_ROWS = 32
ROTATED_BYTES = 128 << 20
WIDTHS = ((576, 576), (576, 3072), (2048, 2048))
"""(in, out) of a site."""


def make_delta(num_inputs: int, num_outputs: int, rank: int) -> SiteDelta:
    """One slice over the whole site, bfloat16."""
    a = torch.randn(rank, num_inputs).bfloat16()
    b = torch.randn(rank, num_outputs).bfloat16()
    return SiteDelta(
        (Slice(0, rank, 0, num_outputs, 2.0),),
        (Tile(0, rank, 0, num_inputs, a),),
        (Tile(0, rank, 0, num_outputs, b),),
        torch.full((rank,), 2.0),
    )


def make_batch(num_inputs: int, num_outputs: int, num_adapters: int) -> tuple[LoraBatch, int]:
    """A batch over as many sites as rotation needs; and that number."""
    ranks = [rank_of(adapter) for adapter in range(num_adapters)]
    site_bytes = 2 * sum(ranks) * (num_inputs + num_outputs)
    num_sites = max(4, ROTATED_BYTES // site_bytes)
    table = {
        (slot, site): make_delta(num_inputs, num_outputs, rank)
        for slot, rank in enumerate(ranks)
        for site in range(num_sites)
    }
    slots = sorted(row % num_adapters for row in range(NUM_ROWS))
    runs = row_runs((1, [(slot, 1.0)]) for slot in slots)
    return LoraBatch(runs, table, Records(table, num_sites)), num_sites


def at_all_sites(add_lora: AddLora, y: Tensor, x: Tensor, batch: LoraBatch, num_sites: int) -> None:
    """One update at each site."""
    for site in range(num_sites):
        add_lora(y, x, site, batch)


def main() -> None:
    """Measure, print, write."""
    limits = measure_limits()
    native = load_native("auto")
    dtype = getattr(torch, dtype_of())
    rows = []
    for num_inputs, num_outputs in WIDTHS:
        for num_adapters in (1, 8, 32):
            batch, num_sites = make_batch(num_inputs, num_outputs, num_adapters)
            paths: dict[str, AddLora] = {"torch": portable.add_lora}
            if native is not None:
                paths[native.isa] = NativeLora(native).add_lora
            x = torch.randn(NUM_ROWS, num_inputs).to(dtype)
            y = torch.zeros(NUM_ROWS, num_outputs, dtype=dtype)
            ranks = sum(rank_of(adapter) for adapter in range(num_adapters))
            floor_s = 2 * ranks * (num_inputs + num_outputs) / limits["read_bytes_per_s"]
            row = {"in": num_inputs, "out": num_outputs, "adapters": num_adapters}
            row["floor_us"] = round(floor_s * 1e6)
            for name, add_lora in paths.items():
                work = partial(at_all_sites, add_lora, y, x, batch, num_sites)
                row[f"{name}_us"] = round(best_s(work) / num_sites * 1e6)
            rows.append(row)
            print(row, flush=True)
    results = {"limits": limits, "dtype": str(dtype), "table": rows}
    write_results("lora_ops", results)


if __name__ == "__main__":
    main()
