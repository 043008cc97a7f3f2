"""Decode steps on a GPU: share of the base (the same engine, LoRA compiled out) and of the floor.

    python -m benchmarks.gpu.gpu_decode [--shape llama-3-8b] [--device cpu --tiny]

Random weights, a context of 1k, one token a step, graphs on; adapters are distinct copies in the
arena. `step_ms` is one engine step with sampling, host included; `gpu_ms` the captured part alone.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import common
from benchmarks.gpu.common import ALL_SEVEN, ATTENTION, SHAPES, Shape
from services.worker.kernels.lora.tables import Tile
from services.worker.request import PlannedRow, Request, SamplingParams, StepPlan
from services.worker.runner import TorchRunner, build_runner
from services.worker.step_batch import runs_of


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences and the adapters they share, spread evenly."""

    batch_size: int
    num_adapters: int
    rank: int
    targets: tuple[str, ...]


CASES = (
    *(Case(size, 1, 16, ATTENTION) for size in (1, 8, 64)),
    *(Case(size, 4, 16, ALL_SEVEN) for size in (8, 64)),
    *(Case(size, size, 16, ATTENTION) for size in (8, 32, 64, 256)),
    *(Case(size, size, 16, ALL_SEVEN) for size in (8, 32, 64, 256)),
    *(Case(64, 64, rank, ATTENTION) for rank in (8, 64, 128)),
    Case(64, 64, 64, ALL_SEVEN),
    Case(256, 64, 16, ALL_SEVEN),
)
TINY_CASES = (Case(2, 2, 8, ATTENTION), Case(3, 1, 4, ALL_SEVEN))


MAX_HOST_STEPS = 50
"""Steps timed with the host included; the GPU alone is timed for all of `--steps`."""


class Bench:
    """A runner, its free blocks, and adapters loaded for one case at a time."""

    def __init__(self, shape: Shape, root: Path, args: argparse.Namespace) -> None:
        self.shape, self.root, self.args = shape, root, args
        base = common.write_base(shape, root / "base", 2 * args.context)
        self.runner: TorchRunner = build_runner(
            base,
            device=args.device,
            dtype=args.dtype,
            arena_bytes=args.arena_bytes,
            max_lora_rank=128,
            max_resident=256,
            load_format="dummy",
        )
        self.runner.arena.data.zero_()
        self.device = self.runner.arena.data.device
        self.itemsize = 4 if self.runner.model_info().dtype == "float32" else 2

    def plan(self, case: Case, has_lora: bool) -> StepPlan:
        """One decode step of sequences with a full context."""
        free = iter(range(self.runner.arena_blocks))
        if has_lora:
            self.load(case, free)
        rows = []
        num_blocks = -(-(self.args.context + 1) // self.runner.tokens_per_block)
        for i in range(case.batch_size):
            params = SamplingParams(max_tokens=1 << 20, seed=i, ignore_eos=True)
            request = Request(f"r{i}", [3] * self.args.context, params, output_ids=[3])
            request.num_computed = self.args.context
            groups = range(self.runner.num_kv_groups)
            request.block_tables = [[next(free) for _ in range(num_blocks)] for _ in groups]
            slots = ((i * case.num_adapters // case.batch_size, 1.0),) if has_lora else ()
            rows.append(PlannedRow(request, self.args.context, 1, True, slots))
        return StepPlan(0, tuple(rows))

    def load(self, case: Case, free: Any) -> None:
        """Load the case's adapters into blocks of their own."""
        folder = self.root / f"r{case.rank}-{len(case.targets)}"
        if not folder.exists():
            dtype = torch.bfloat16 if self.itemsize == 2 else torch.float32
            common.write_adapter(self.shape, folder, case.rank, case.targets, dtype)
        num_blocks = self.runner.adapter_blocks(folder)
        blocks = [[next(free) for _ in range(num_blocks)] for _ in range(case.num_adapters)]
        self.runner.load_adapter(0, folder, blocks[0])
        for slot in range(1, case.num_adapters):
            self.copy_adapter(slot, blocks[0], blocks[slot])

    def copy_adapter(self, slot: int, source: list[int], target: list[int]) -> None:
        """Enter a copy of slot 0 under `slot`, on the device: files would take minutes."""
        arena, adapters = self.runner.arena, self.runner._adapters
        arena.data[target[0] : target[-1] + 1] = arena.data[source[0] : source[-1] + 1]
        shift_bytes = (target[0] - source[0]) * arena.block_bytes
        for site in adapters._sites_of_slot[0]:
            delta = adapters.table[0, site]
            a, b = (tuple(moved(t, shift_bytes) for t in part) for part in (delta.a, delta.b))
            adapters.table[slot, site] = replace(delta, a=a, b=b)
        adapters._sites_of_slot[slot] = adapters._sites_of_slot[0]
        if self.runner._batches.gpu is not None:
            self.runner._batches.gpu.enter(slot)

    def measure(self, plan: StepPlan) -> dict[str, float]:
        """Milliseconds of a step."""
        for _ in range(3):
            self.runner.execute(plan)
        steps = self.args.steps
        host_steps = min(steps, MAX_HOST_STEPS)
        step_s = common.median_s(lambda: self.runner.execute(plan), self.device, host_steps)
        times = {"step_ms": step_s * 1e3}
        gpu = self.runner._batches.gpu
        if gpu is not None and self.device.type == "cuda":
            runs = runs_of(plan)
            with torch.inference_mode():
                gpu_s = common.device_median_s(lambda: gpu.forward(plan, runs), steps)
            times["gpu_ms"] = gpu_s * 1e3
        return times


def moved(tile: Tile, shift_bytes: int) -> Tile:
    """The tile so many bytes further on in the arena."""
    data = tile.data
    offset = data.storage_offset() + shift_bytes // data.itemsize
    return replace(tile, data=data.as_strided(data.shape, data.stride(), offset))


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES["tiny" if args.tiny else args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(shape, Path(scratch), args)
        copy_bytes = 1 << 20 if args.tiny else common.COPY_BYTES
        bandwidth = common.copy_bytes_per_s(bench.device, copy_bytes)
        bases: dict[int, dict[str, float]] = {}
        rows = []
        for case in TINY_CASES if args.tiny else CASES:
            row = run_case(bench, case, bases, bandwidth)
            print(row, flush=True)
            rows.append(row)
    common.print_table(rows)
    facts = {"shape": shape.name, "context": args.context, "steps": args.steps}
    results = {**facts, "copy_bytes_per_s": bandwidth, "rows": rows}
    path = common.write_results(f"gpu_decode_{shape.name}", bench.device, results, args.out)
    print(f"wrote {path}")


def run_case(
    bench: Bench, case: Case, bases: dict[int, dict[str, float]], bandwidth: float
) -> dict[str, Any]:
    """One row of the table. Mutates: bases, by batch size."""
    if case.batch_size not in bases:
        bases[case.batch_size] = bench.measure(bench.plan(case, has_lora=False))
    times, base = bench.measure(bench.plan(case, has_lora=True)), bases[case.batch_size]
    for slot in range(case.num_adapters):
        bench.runner.unload_adapter(slot)
    adapter_bytes = bench.shape.adapter_bytes(case.rank, case.targets, bench.itemsize)
    context, itemsize = bench.args.context, bench.itemsize
    floors = [
        common.floor_s(bench.shape, case.batch_size, context, n, adapter_bytes, itemsize, bandwidth)
        for n in (0, case.num_adapters)
    ]
    best = "gpu_ms" if "gpu_ms" in times else "step_ms"
    return {
        "batch": case.batch_size,
        "adapters": case.num_adapters,
        "rank": case.rank,
        "modules": len(case.targets),
        **times,
        "share_of_base": base[best] / times[best],
        "share_of_base_at_floor": floors[0] / floors[1],
        "share_of_floor": floors[1] * 1e3 / times[best],
    }


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=[n for n in SHAPES if n != "tiny"], default="llama-3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of each sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--arena-bytes", type=int, default=96 << 30)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--tiny", action="store_true", help="a small model: does it run at all")
    args = parser.parse_args()
    if args.tiny:
        args.context, args.steps, args.arena_bytes = 32, 3, 8 << 20
    return args


if __name__ == "__main__":
    main()
