"""Base products alone: what a worker uses here, dot products, float32 vectors, and torch's.

    python -m benchmarks run cpu.products

One thread each, alternately; medians of processor time. Torch's side is `linear` in bfloat16, which
is oneDNN's product of a weight that is not packed. Weights rotate over more memory than caches
hold, as the layers of a model do in a step. Both shapes are those of real layers: the gates of the
135M geometry, and the projection back from them in the 1.5B geometry.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.machine import write_results
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.native.isa import LEVELS, choose_isa, host_isas

SHAPES = ((3072, 576), (1536, 8960))
"""(out, in) of a weight."""
ROWS = (1, 8, 32, 240, 1024)
ROTATED_BYTES = 128 << 20
TURNS = 5

Product = Callable[[torch.Tensor, int], torch.Tensor]
"""Multiplies bfloat16 rows by the weight with the given index."""


def sides_of(weights: list[torch.Tensor]) -> dict[str, Product]:
    """The products to compare, by name."""
    num_outputs = len(weights[0])
    sides: dict[str, Product] = {"onednn": lambda x, i: F.linear(x, weights[i])}
    float32 = next(isa for isa in host_isas() if not LEVELS[isa].has_dot_products)
    if (vectors := load_native(float32)) is not None:
        vectors.set_threads(1)
        packed = [vectors.pack(weight) for weight in weights]
        sides["float32"] = lambda x, i: vectors.linear(x.float(), packed[i], num_outputs)
    if (native := load_native("auto")) is not None:
        native.set_threads(1)
        operators = NativeOperators(native, torch.bfloat16)
        linears = [operators.linear(weight) for weight in weights]
        sides["ours"] = lambda x, i: linears[i].apply(x)
        if native.has_tiles:
            tiles = [native.pack_tiles(weight) for weight in weights]
            panels = [native.pack(weight) for weight in weights]
            sides["tiles"] = lambda x, i: native.linear_tiles(x, tiles[i], num_outputs)
            sides["widened"] = lambda x, i: native.linear(x, panels[i], num_outputs)
    return sides


def measure(num_outputs: int, num_inputs: int) -> list[dict[str, float]]:
    """One row for each number of rows: microseconds of each side."""
    count = max(2, ROTATED_BYTES // (2 * num_outputs * num_inputs))
    sides = sides_of([torch.randn(num_outputs, num_inputs).bfloat16() for _ in range(count)])
    table = []
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        used = range(count if num_rows <= 32 else 2)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(TURNS):
            for name, product in sides.items():
                begin_s = time.process_time()
                for i in used:
                    product(x, i)
                seconds[name].append((time.process_time() - begin_s) / len(used))
        row: dict[str, float] = {"out": num_outputs, "in": num_inputs, "rows": num_rows}
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        row |= {f"{name}_us": round(value * 1e6) for name, value in medians.items()}
        ours = medians["ours"]
        row |= {f"{name}_over_ours": round(v / ours, 2) for name, v in medians.items()}
        table.append(row)
        print(row, flush=True)
    return table


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    table = [row for shape in SHAPES for row in measure(*shape)]
    write_results("cpu_products", {"isa": choose_isa("auto"), "table": table})


if __name__ == "__main__":
    main()
