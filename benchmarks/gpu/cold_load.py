"""Loading an adapter into the arena: milliseconds and GB/s, compared with a plain pinned copy.

    python -m benchmarks.gpu.cold_load [--rank 16] [--device cpu --tiny]

`pack_ms` is paid once for each digest, off the step's thread. `disk_copy_ms` takes the packed image
from the page cache into the pinned pool and on into the arena, alongside the step; `copy_ms` is the
same of an image that is in the pool (without a GPU there is none). `enter_ms` writes the tables
that kernels read, on the engine's thread. A load from the host is copy and enter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu import common
from benchmarks.gpu.bench_runner import HOST_CACHE_BYTES
from benchmarks.gpu.checks import WrongResult
from benchmarks.gpu.common import SHAPES
from benchmarks.llama import write_adapter, write_base_config
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor
from loraplex_services.worker.types.runner_protocol import Copied
from tests.worker.loading import blocks_of, in_blocks, load_adapter


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES["tiny" if args.tiny else args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        base = write_base_config(shape, Path(scratch) / "base", 128)
        runner = build_runner(
            base,
            device=args.device,
            arena_bytes=args.arena_bytes,
            host_cache_bytes=HOST_CACHE_BYTES,
            load_format="dummy",
            executors=(InlineExecutor(), InlineExecutor()),
        )
        runner.arena.data.zero_()
        device = runner.arena.data.device
        dtype = getattr(torch, runner.model_info().dtype)
        folder = Path(scratch) / "adapter"
        write_adapter(shape, folder, args.rank, dtype, seed=args.rank)
        begin_s = time.perf_counter()
        num_pages = runner.pack_adapter(folder).result()
        pack_s = time.perf_counter() - begin_s
        blocks = list(range(blocks_of(runner, num_pages)))
        extents = in_blocks(runner, num_pages, blocks)

        def copy() -> Copied:
            return runner.copy_adapter(folder, extents).result()

        begin_s = time.perf_counter()
        copied = copy()
        disk_copy_s = time.perf_counter() - begin_s
        check_copy(runner, folder, blocks)
        copy_s = common.median_s(copy, device, args.repetitions)
        enters = []
        for _ in range(args.repetitions):
            enters.append(common.median_s(lambda: runner.enter_adapter(0, copied), device, 1))
            runner.unload_adapter(0)
        enter_s = statistics.median(enters)
        num_bytes = dtype.itemsize * shape.num_adapter_weights(args.rank)
        pinned_s = pinned_copy_s(num_bytes, device, args.repetitions)
    row = {
        "shape": shape.name,
        "rank": args.rank,
        "megabytes": num_bytes / 1e6,
        "pack_ms": pack_s * 1e3,
        "disk_copy_ms": disk_copy_s * 1e3,
        "copy_ms": copy_s * 1e3,
        "copy_gb_per_s": num_bytes / copy_s / 1e9,
        "enter_ms": enter_s * 1e3,
        "load_ms": (copy_s + enter_s) * 1e3,
        "pinned_copy_ms": pinned_s * 1e3,
        "pinned_copy_gb_per_s": num_bytes / pinned_s / 1e9,
    }
    common.print_table([row])
    print(f"wrote {common.write_results('cold_load', device, row, args.out)}")


def check_copy(runner: TorchRunner, folder: Path, blocks: list[int]) -> None:
    """Compare the blocks with those of the same adapter when it is loaded without image and pinned
    memory.

    Raises:
        WrongResult: they differ.
    """
    others = range(len(blocks), 2 * len(blocks))
    load_adapter(runner, 1, folder, lambda _: others)
    common.synchronize(runner.arena.data.device)
    if not runner.arena.data[blocks].equal(runner.arena.data[list(others)]):
        raise WrongResult("the copied image is not the packed adapter")
    runner.unload_adapter(1)


def pinned_copy_s(num_bytes: int, device: torch.device, repetitions: int) -> float:
    """Seconds of one copy of as many bytes from pinned host memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target.copy_(source)
    return common.median_s(lambda: target.copy_(source, non_blocking=True), device, repetitions)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = common.options_of(__doc__)
    parser.add_argument("--shape", choices=[n for n in SHAPES if n != "tiny"], default="llama-3-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--arena-bytes", type=int, default=4 << 30)
    args = parser.parse_args()
    if args.tiny:
        args.repetitions, args.arena_bytes = 2, 8 << 20
    return args


if __name__ == "__main__":
    main()
