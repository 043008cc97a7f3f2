"""Cost of the parallel regions of a decode step: an upper bound on what fusing them can gain.

    python -m benchmarks run cpu.parallel_regions --work-dir DIR [--model 135m] [--rows 1,8,32]

Counts the regions of a step (calls of compiled kernels, two for attention). The count is an upper
bound, since small operators of up to 16 rows run on the calling thread alone. Times regions of two
empty tasks in the same pool (`native/src/pool.cpp`, built for this), back to back and with the mean
gap of a step between them, in which the other threads may fall asleep. A step with one region per
layer would still wait for all threads between most of its parts, so the real gain is smaller.

Also times the step as it really runs, by a program without Python between the calls.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import SHAPES, make_adapter, make_base, make_prompts
from benchmarks.machine import write_results
from loraplex_services.worker.native import bindings
from loraplex_services.worker.native.build import FLAGS, SOURCE_DIR, find_compiler

ARENA_BYTES = 1_000_000_000
NUM_TOKENS = 48
LOOPS = 20_000
ATTENTION = ("lpx_attend", "lpx_attend_tiles")
HARNESS = r"""
#include "pool.h"
#include <chrono>
// Mean seconds of a region of two empty tasks, `gap_s` after the one before.
extern "C" __attribute__((visibility("default")))
double region_s(int64_t num_threads, int64_t num_loops, double gap_s) {
    using Clock = std::chrono::steady_clock;
    lpx::set_threads(static_cast<int>(num_threads));
    double total_s = 0;
    for (int64_t i = 0; i < num_loops; ++i) {
        const auto idle = Clock::now();
        while (std::chrono::duration<double>(Clock::now() - idle).count() < gap_s) {}
        const auto begin = Clock::now();
        lpx::parallel_for(2, [](int64_t) {});
        total_s += std::chrono::duration<double>(Clock::now() - begin).count();
    }
    return total_s / num_loops;
}
"""


class Clocked:
    """Stands in for the kernels of a library: counts calls and the time within."""

    def __init__(self, kernels: Any) -> None:
        self.calls, self.within_s = 0, 0.0
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = self._clocked(getattr(self._kernels, name), 1 + (name in ATTENTION))
        setattr(self, name, call)
        return call

    def _clocked(self, kernel: Callable[..., None], num_regions: int) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            begin_s = time.perf_counter()
            kernel(*arguments)
            self.within_s += time.perf_counter() - begin_s
            self.calls += num_regions

        return call


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--work-dir", type=Path, required=True, help="keep models here")
    parser.add_argument("--rows", default="1,8,32")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    region_s = empty_region(torch.get_num_threads())
    shape = SHAPES[args.model]
    base = make_base(shape, args.work_dir)
    engine = OurEngine(base, "auto", "auto", ARENA_BYTES)
    engine.load([make_adapter(shape, args.work_dir, 0)])
    native = bindings.load_native("auto")
    assert native is not None, "torch has no regions of ours"
    clocked = Clocked(native._kernels)
    table = []
    for rows in map(int, args.rows.split(",")):
        for num_adapters in (0, 1):
            prompts = make_prompts(rows, shape.vocab_size, seed=rows)
            engine.run(prompts, num_adapters, 4)
            program_s = decode_step(engine, clocked, prompts, num_adapters)["step_s"]
            with in_python(engine, native, clocked):
                step = decode_step(engine, clocked, prompts, num_adapters)
            cost_s = region_s(step["gap_s"])
            row = {
                "case": f"{rows}x{num_adapters}",
                "step_ms": round(step["step_s"] * 1e3, 2),
                "regions": step["regions"],
                "gap_us": round(step["gap_s"] * 1e6, 1),
                "region_us": round(cost_s * 1e6, 2),
                "region_at_once_us": round(region_s(0.0) * 1e6, 2),
                "regions_over_step": round(step["regions"] * cost_s / step["step_s"], 4),
                "gaps_over_step": round(1 - step["within_s"] / step["step_s"], 4),
                "program_over_step": round(program_s / step["step_s"], 4),
            }
            table.append(row)
            print(row, flush=True)
    write_results("parallel_regions", {"model": args.model, "isa": native.isa, "table": table})


@contextlib.contextmanager
def in_python(engine: OurEngine, native: Any, clocked: Clocked) -> Iterator[None]:
    """Compute the layers in Python, with a clock, instead of by programs."""
    model, kernels = engine.model, native._kernels
    programs, model.pass_layers = model.pass_layers, model.forward_layers
    native._kernels = clocked
    try:
        yield
    finally:
        model.pass_layers, native._kernels = programs, kernels


def decode_step(
    engine: OurEngine, clocked: Clocked, prompts: list[list[int]], num_adapters: int
) -> dict[str, Any]:
    """Of one decode step: seconds, regions, seconds in kernels, and between two of them.

    Two runs that differ in their number of decode steps: what is left is those steps'.
    """
    totals = []
    for num_tokens in (4, 4 + NUM_TOKENS):
        clocked.calls, clocked.within_s = 0, 0.0
        wall_s = engine.run(prompts, num_adapters, num_tokens).wall_s
        totals.append((clocked.calls, clocked.within_s, wall_s))
    calls, within_s, step_s = ((b - a) / NUM_TOKENS for a, b in zip(*totals, strict=True))
    gap_s = (step_s - within_s) / max(calls, 1)
    return {"regions": round(calls), "step_s": step_s, "within_s": within_s, "gap_s": gap_s}


def empty_region(num_threads: int) -> Callable[[float], float]:
    """Seconds of an empty region that long after the one before: the median of five rounds."""
    compiler = find_compiler()
    assert compiler is not None, "needs a C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        harness, library = Path(folder, "harness.cpp"), Path(folder, "harness.so")
        harness.write_text(HARNESS)
        sources = [str(harness), str(SOURCE_DIR / "pool.cpp"), f"-I{SOURCE_DIR}"]
        subprocess.run([*compiler, *FLAGS, "-shared", *sources, "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).region_s
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double)

    def measure(gap_s: float) -> float:
        loops = LOOPS if gap_s == 0.0 else min(LOOPS, int(0.2 / gap_s) + 1)
        rounds: list[float] = [function(num_threads, loops, gap_s) for _ in range(5)]
        return statistics.median(rounds)

    return measure


if __name__ == "__main__":
    main()
