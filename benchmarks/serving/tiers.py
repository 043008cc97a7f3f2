"""First tokens, and bytes, of adapters on each tier of a worker, at the geometry of Llama-7B.

    python -m benchmarks run serving.tiers --work-dir DIR

An engine and the fetching part of a worker, in one process, without network. The base has random
weights in int4, so that it fits into 5 GB. 2,000 adapters of rank 16 on all linears (80 MB in
bfloat16) are published, and fetched, verified and packed by the worker. All but nine of them are
zero except for 16 pages, and their files have holes, so that they fit on a disk (`sparse_files`).
For the nine others, which have random values, one request at a time has a prompt of 16 tokens while
the adapter is

- on the device: in the arena,
- on the host: its image is in the host cache of a GPU's worker, here in memory that is not pinned,
- on disk, in the page cache or not: as on a CPU's worker, which has no tier in between, or
- in the store, a folder on the same disk: fetched, verified and packed first.

Prints the median and the extremes of the wall time, the median of the processor time of all threads
and packing processes, and the wall time of the copy to the device alone; then the number and the
bytes of adapters on each tier, and what publishing and fetching one of the 2,000 took.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import psutil
import torch

from benchmarks.llama import LLAMA_2_7B, write_adapter, write_base_config
from benchmarks.machine import options_of, write_results
from benchmarks.serving.many_adapters import make_config
from benchmarks.serving.sparse_files import SparseStore, dig_holes, write_sparse_adapter
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.cli.output import print_table
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter, DiskCache
from loraplex_services.worker.adapters.fetch.pack_pool import PackPool
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.adapters.pack.image import images_in
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.model.on_load import QuantisedOnLoad
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.messages import AdapterFetched, Submit, UnloadAdapter
from tests.worker import tiny

T = TypeVar("T")

SHAPE = LLAMA_2_7B
RANK, NUM_PROMPT = 16, 16
CACHE_BYTES = 1 << 40
"""Files with holes count with their lengths."""


class Bench:
    """An engine, and what fetches for it."""

    def __init__(self, work_dir: Path, arena_bytes: int) -> None:
        base = write_base_config(SHAPE, work_dir / SHAPE.name, 2048)
        with patch.object(QuantisedOnLoad, "take_codes", _same_codes(QuantisedOnLoad.take_codes)):
            self.runner = build_runner(
                base,
                device="cpu",
                dtype="bfloat16",
                arena_bytes=arena_bytes,
                load_format="dummy",
                quantization="int4",
            )
        self.engine = Engine(self.runner, make_config(base, arena_bytes), time.monotonic)
        self.geometry = self.runner.model_info().geometry
        self.store = SparseStore(work_dir / "objects")
        self.disk = DiskCache(work_dir / "cache", CACHE_BYTES, lambda digest: None)
        self.source = AdapterSource(self.store, self.disk)
        self.pool = PackPool(self.geometry, self.runner.layout)
        self.source.pack_with(self.pool)
        self._order = random.Random(0)
        self._num_sent = 0

    def first_token(self, adapter: DiskAdapter) -> float:
        """Compute the first token of a request for an adapter on disk. Returns the seconds of its
        copy to the device."""
        self._num_sent += 1
        request = WorkerRequest(
            request_id=str(self._num_sent),
            prompt_ids=[self._order.randrange(SHAPE.vocab_size) for _ in range(NUM_PROMPT)],
            sampling=SamplingParams(1, seed=0, ignore_eos=True),
            adapters=AdapterSet(((adapter.digest, 1.0),)),
        )
        path = str(adapter.path)
        fetched = AdapterFetched(adapter.digest, path, adapter.max_rank, adapter.num_pages)
        output = self.engine.step([fetched, Submit(request=request)])
        copy_s = sum(output.copies_s)
        while not output.tokens:
            assert not output.failures, output.failures
            if not self.engine.may_advance:
                self.runner.await_copies(1.0)
            output = self.engine.step([])
            copy_s += sum(output.copies_s)
        return copy_s

    async def served(self, digest: str) -> float:
        """The first token for an adapter wherever it is: see `first_token`."""
        return self.first_token(await self.source.ensure(digest))

    def unload(self, adapter: DiskAdapter) -> None:
        """Take an adapter off the device."""
        self.engine.step([UnloadAdapter(adapter.digest)])

    async def publish(self, work_dir: Path, number: int, *, is_sparse: bool) -> str:
        """Put an adapter into the store."""
        folder = work_dir / "adapter"
        if is_sparse:
            write_sparse_adapter(SHAPE, folder, RANK, seed=number)
        else:
            write_adapter(SHAPE, folder, RANK, torch.bfloat16, seed=number)
        digest = await tiny.publish(self.store, self.geometry, folder)
        shutil.rmtree(folder)
        return digest

    async def fetched(self, digest: str) -> DiskAdapter:
        """Fetch, verify and pack an adapter, and tell the engine of it."""
        adapter = await self.source.ensure(digest)
        fetched = adapter.digest, str(adapter.path), adapter.max_rank, adapter.num_pages
        self.engine.step([AdapterFetched(*fetched)])
        return adapter


def _same_codes(take: Any) -> Any:
    """`take_codes` that quantises one weight of each shape: 32 layers would take minutes."""
    made: dict[tuple[bool, tuple[int, ...]], Any] = {}

    def take_codes(self: QuantisedOnLoad, name: str, shape: Sequence[int]) -> Any:
        key = "layers" in name, tuple(shape)
        if key not in made:
            made[key] = take(self, name, shape)
        return made[key]

    return take_codes


def _leave_page_cache(adapter: DiskAdapter) -> None:
    """Drop the adapter's image from the page cache, so that it is read from the disk."""
    for path in images_in(adapter.path):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@dataclass
class Times:
    """Times of first tokens from one tier."""

    bench: Bench
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)

    async def take(self, first_token: Awaitable[float]) -> None:
        """Measure one."""
        self.copy_s.append(await self.timed(first_token))

    async def timed(self, work: Awaitable[T]) -> T:
        """Measure anything. Returns its result."""
        begin_s, begin_cpu_s = time.perf_counter(), self._cpu_s()
        result = await work
        self.wall_s.append(time.perf_counter() - begin_s)
        self.cpu_s.append(self._cpu_s() - begin_cpu_s)
        return result

    def _cpu_s(self) -> float:
        """Processor seconds of this process and of those that pack."""
        packing = (psutil.Process(process.pid) for process in self.bench.pool._processes)
        times = [process.cpu_times() for process in (psutil.Process(), *packing)]
        return sum(each.user + each.system for each in times)

    def summary(self) -> dict[str, float]:
        """The times in milliseconds."""
        return {
            "median_ms": statistics.median(self.wall_s) * 1e3,
            "shortest_ms": min(self.wall_s) * 1e3,
            "longest_ms": max(self.wall_s) * 1e3,
            "processor_ms": statistics.median(self.cpu_s) * 1e3,
            "copy_ms": statistics.median(self.copy_s or [0.0]) * 1e3,
        }


async def _measure(
    bench: Bench, adapters: Sequence[DiskAdapter], prepare: Callable[[DiskAdapter], object]
) -> dict[str, float]:
    times = Times(bench)
    for adapter in adapters:
        prepare(adapter)
        await times.take(bench.served(adapter.digest))
    return times.summary()


async def fill(bench: Bench, work_dir: Path, num_adapters: int) -> dict[str, Any]:
    """Publish and fetch sparse adapters. Returns what one took."""
    published, fetched = Times(bench), Times(bench)
    for number in range(num_adapters):
        digest = await published.timed(bench.publish(work_dir, number, is_sparse=True))
        adapter = await fetched.timed(bench.fetched(digest))
        for image in images_in(adapter.path):
            dig_holes(image)
    return {"published": published.summary(), "fetched": fetched.summary()} if num_adapters else {}


def bytes_under(folder: Path) -> dict[str, int]:
    """Total length of all files, and the space that they take."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {"length": sum(s.st_size for s in stats), "space": sum(512 * s.st_blocks for s in stats)}


async def measure(
    work_dir: Path, num_sparse: int, num_adapters: int, arena_bytes: int
) -> dict[str, Any]:
    """First tokens by tier, and the bytes of one adapter and of all."""
    bench = Bench(work_dir, arena_bytes)
    sparse = await fill(bench, work_dir, num_sparse)
    seeds = range(num_sparse, num_sparse + num_adapters + 1)
    digests = [await bench.publish(work_dir, seed, is_sparse=False) for seed in seeds]
    await bench.served(digests.pop())  # warms up
    times = Times(bench)
    for digest in digests:
        await times.take(bench.served(digest))
    first = {"store": times.summary()}
    adapters = [await bench.source.ensure(digest) for digest in digests]

    def leave(adapter: DiskAdapter) -> None:
        bench.unload(adapter)
        _leave_page_cache(adapter)

    first["disk, not in the page cache"] = await _measure(bench, adapters, leave)
    first["disk, in the page cache"] = await _measure(bench, adapters, bench.unload)
    [image] = images_in(adapters[0].path)
    host = PinnedCache(bench.runner.arena, 2 * image.stat().st_size)
    bench.runner._adapters._host = host

    def stage(adapter: DiskAdapter) -> None:
        bench.unload(adapter)
        bench.first_token(adapter)
        bench.unload(adapter)
        assert adapter.path in host

    first["host"] = await _measure(bench, adapters, stage)
    first["device"] = await _measure(bench, adapters, bench.first_token)
    await bench.source.close()
    page_bytes = bench.runner.block_bytes // bench.runner.arena.pages_per_block
    return {
        "base": f"{SHAPE.name}, int4",
        "rank": RANK,
        "num_adapters": num_adapters,
        "num_sparse": num_sparse,
        "first_token": first,
        "sparse": sparse,
        "bytes": {
            "weights": 2 * SHAPE.num_adapter_weights(RANK),
            "device": adapters[0].num_pages * page_bytes,
            "host": adapters[0].num_pages * page_bytes,
            "disk": adapters[0].num_bytes,
        },
        "all": {
            "known_to_the_engine": len(bench.engine.cache.adapters()),
            "disk": bytes_under(work_dir / "cache"),
            "store": bytes_under(work_dir / "objects"),
        },
    }


def main() -> None:
    """Measure, print, write `results/<machine>/tiers.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; start empty")
    parser.add_argument("--stored", type=int, default=1990, help="sparse adapters")
    parser.add_argument("--adapters", type=int, default=9, help="adapters with random values")
    parser.add_argument("--arena-bytes", type=int, default=384 << 20)
    args = parser.parse_args()
    results = asyncio.run(measure(args.work_dir, args.stored, args.adapters, args.arena_bytes))
    rows = [
        [tier, *(f"{times[name]:.0f}" for name in times)]
        for tier, times in results["first_token"].items()
    ]
    print_table(["FIRST TOKEN FROM", "MEDIAN ms", "SHORTEST", "LONGEST", "PROCESSOR", "COPY"], rows)
    print_table(
        ["TIER", "BYTES OF AN ADAPTER"], [[k, f"{v:,}"] for k, v in results["bytes"].items()]
    )
    for name, times in results["sparse"].items():
        print(f"{name}: median {times['median_ms']:.0f} ms, {times['processor_ms']:.0f} of a core")
    for name, found in results["all"].items():
        print(f"{name}: {found}")
    write_results("tiers", results, args)


if __name__ == "__main__":
    main()
