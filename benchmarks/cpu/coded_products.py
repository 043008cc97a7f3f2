"""Products with quantised weights relative to bfloat16 ones, at the linears of the 0.5B geometry.

    python -m benchmarks run cpu.coded_products

All threads, in turns; medians of wall time. Weights rotate over more memory than caches hold, as
the layers of a model do in a step. Prints how many times faster than bfloat16 each kind of codes
is, and writes `results/<machine>/cpu_coded_products.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.machine import write_results
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.ops.linear.coded import FLOAT8, INTEGERS, CodedWeight
from loraplex_services.worker.ops.linear.torch import BaseLinear

SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""(out, in) of qkv, o, gate_up and down."""
ROWS = (1, 2, 4, 8, 16, 32, 128)
NUM_LAYERS, TURNS = 6, 9


def int8(shape: tuple[int, int]) -> CodedWeight:
    """A scale for each row."""
    codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    return CodedWeight("int8", codes, torch.rand(shape[0], 1).bfloat16(), shape[1])


def float8(shape: tuple[int, int]) -> CodedWeight:
    """A scale for each row."""
    return CodedWeight("fp8", torch.randn(shape).to(FLOAT8), torch.rand(shape[0], 1), shape[1])


def int4(shape: tuple[int, int], group_size: int) -> CodedWeight:
    """A scale for each group."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scales = torch.rand(shape[0], -(-shape[1] // group_size)).bfloat16()
    return CodedWeight("int4", codes, scales, group_size, table=INTEGERS - 8)


def main() -> None:
    """Measure, print, write."""
    native = load_native("auto")
    if native is None:
        raise SystemExit("there are no compiled kernels here")
    native.set_threads(torch.get_num_threads())
    torch.set_num_threads(1)
    operators = NativeOperators(native, torch.bfloat16)
    kinds: dict[str, Callable[[tuple[int, int]], BaseLinear]] = {
        "bfloat16": lambda shape: operators.linear(torch.randn(shape).bfloat16()),
        "int8": lambda shape: operators.coded_linear(int8(shape), torch.bfloat16),
        "fp8": lambda shape: operators.coded_linear(float8(shape), torch.bfloat16),
    }
    for size in (32, 64, 128):
        kinds[f"int4-g{size}"] = lambda shape, size=size: operators.coded_linear(  # type: ignore[misc]
            int4(shape, size), torch.bfloat16
        )
    layers = {
        kind: [[make(shape) for shape in SHAPES] for _ in range(NUM_LAYERS)]
        for kind, make in kinds.items()
    }
    table = [measure(layers, num_rows) for num_rows in ROWS]
    write_results("cpu_coded_products", {"isa": native.isa, "table": table})


def measure(layers: dict[str, list[list[BaseLinear]]], num_rows: int) -> dict[str, float]:
    """How many times faster than bfloat16 each kind is."""
    inputs = [torch.randn(num_rows, num_inputs).bfloat16() for _, num_inputs in SHAPES]
    seconds: dict[str, list[float]] = {kind: [] for kind in layers}
    for _ in range(TURNS):
        for kind, own in layers.items():
            begin_s = time.perf_counter()
            for linears in own:
                for linear, x in zip(linears, inputs, strict=True):
                    linear.apply(x)
            seconds[kind].append(time.perf_counter() - begin_s)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    row: dict[str, float] = {"rows": num_rows, "bfloat16_ms": medians["bfloat16"] * 1e3}
    row |= {kind: medians["bfloat16"] / value for kind, value in medians.items()}
    print({key: round(value, 2) for key, value in row.items()}, flush=True)
    return row


if __name__ == "__main__":
    main()
