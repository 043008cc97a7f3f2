"""The memory bandwidth and the rate of float operations of this machine, on all cores.

    python -m benchmarks run cpu.limits

The best of several rounds, since other processes can only make a round slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.machine import write_results
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.bindings import load_native
from loraplex_services.worker.native.isa import half_is_fast

READ_BYTES = 512 << 20
ROUNDS = 9


def best_s(work: Callable[[], object]) -> float:
    """Shortest of several rounds, after one to warm up."""
    work()
    seconds = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


def measure_limits(isa: str = "auto") -> dict[str, float]:
    """Bytes read from memory and operations per second, with the fastest dtype of a level."""
    data = torch.zeros(READ_BYTES // 4)
    read_s = best_s(data.sum)
    rows, inputs, outputs = 192, 576, 3072
    num_flops = 2 * rows * inputs * outputs
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    flops_per_s = [num_flops / best_s(lambda: torch.nn.functional.linear(x, weight))]
    if (native := load_native(isa)) is not None:
        native.set_threads(torch.get_num_threads())
        packed = native.pack(weight)
        flops_per_s.append(num_flops / best_s(lambda: native.linear(x, packed, outputs)))
    if half_is_fast(isa):
        half, narrow = x.bfloat16(), weight.bfloat16()
        flops_per_s.append(num_flops / best_s(lambda: torch.nn.functional.linear(half, narrow)))
        if native is not None:
            linear = NativeOperators(native, torch.bfloat16).linear(narrow)
            flops_per_s.append(num_flops / best_s(lambda: linear.apply(half)))
    return {"read_bytes_per_s": READ_BYTES / read_s, "flops_per_s": max(flops_per_s)}


if __name__ == "__main__":
    limits = measure_limits()
    giga = {name: round(value / 1e9, 1) for name, value in limits.items()}
    print(f"read {giga['read_bytes_per_s']} GB/s, {giga['flops_per_s']} GFLOP/s")
    write_results("cpu_limits", limits)
