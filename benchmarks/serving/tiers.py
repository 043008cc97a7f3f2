"""First tokens, and bytes, of adapters on each tier of a worker, at the geometry of Llama-7B.

    python -m benchmarks run serving.tiers --work-dir DIR

An engine and the fetching part of a worker, in one process, without network. The base has 4 of the
32 layers with random weights, so that it fits into 3 GB, and adapters on all linears of rank 128,
which are as large as adapters of rank 16 on 32 layers (80 MB in bfloat16). One request at a time
has a prompt of 16 tokens for an adapter that is

- on the device: in the arena,
- on the host: its image is in the host cache of a GPU's worker, here in memory that is not pinned,
- on disk, in the page cache or not: as on a CPU's worker, which has no tier in between, or
- in the store, a folder on the same disk: fetched, verified and packed first.

Prints the median and the extremes of the wall time, the median of the processor time of all threads
and packing processes, and the wall time of the copy to the device alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.llama import Shape, write_adapter
from benchmarks.machine import write_results
from benchmarks.serving.many_adapters import make_config
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.cli.output import print_table
from loraplex_services.common.objects.file import FileStore
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter, DiskCache
from loraplex_services.worker.adapters.fetch.pack_pool import PackPool
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.adapters.pack.image import images_in
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.messages import AdapterFetched, Submit, UnloadAdapter
from tests.worker import tiny

SHAPE = Shape("llama-7b-4-layers", 32000, 4096, 11008, 4, 32, 32)
RANK, NUM_PROMPT = 128, 16


class Bench:
    """An engine, and what fetches for it."""

    def __init__(self, work_dir: Path, arena_bytes: int) -> None:
        base = _write_config(work_dir)
        self.runner = build_runner(
            base, device="cpu", dtype="bfloat16", arena_bytes=arena_bytes, load_format="dummy"
        )
        self.engine = Engine(self.runner, make_config(base, arena_bytes), time.monotonic)
        self.geometry = self.runner.model_info().geometry
        self.store = FileStore(work_dir / "objects")
        self.disk = DiskCache(work_dir / "cache", None, lambda digest: None)
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

    async def publish(self, work_dir: Path, number: int) -> str:
        """Put an adapter into the store."""
        folder = work_dir / f"adapter-{number:03d}"
        write_adapter(SHAPE, folder, RANK, torch.bfloat16, seed=number)
        return await tiny.publish(self.store, self.geometry, folder)


def _write_config(work_dir: Path) -> Path:
    folder = work_dir / SHAPE.name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": SHAPE.vocab_size,
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size,
        "num_hidden_layers": SHAPE.num_layers,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _leave_page_cache(adapter: DiskAdapter) -> None:
    """Have the system read the adapter's image from the disk again."""
    for path in images_in(adapter.path):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@dataclass
class Times:
    """What first tokens from one tier took."""

    bench: Bench
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)

    async def take(self, first_token: Awaitable[float]) -> None:
        """Measure one."""
        begin_s, begin_cpu_s = time.perf_counter(), self._cpu_s()
        self.copy_s.append(await first_token)
        self.wall_s.append(time.perf_counter() - begin_s)
        self.cpu_s.append(self._cpu_s() - begin_cpu_s)

    def _cpu_s(self) -> float:
        """Processor seconds of this process and of those that pack."""
        packing = (psutil.Process(process.pid) for process in self.bench.pool._processes)
        times = [process.cpu_times() for process in (psutil.Process(), *packing)]
        return sum(each.user + each.system for each in times)

    def summary(self) -> dict[str, float]:
        """In milliseconds."""
        return {
            "median_ms": statistics.median(self.wall_s) * 1e3,
            "shortest_ms": min(self.wall_s) * 1e3,
            "longest_ms": max(self.wall_s) * 1e3,
            "processor_ms": statistics.median(self.cpu_s) * 1e3,
            "copy_ms": statistics.median(self.copy_s) * 1e3,
        }


async def _measure(
    bench: Bench, adapters: Sequence[DiskAdapter], prepare: Callable[[DiskAdapter], object]
) -> dict[str, float]:
    times = Times(bench)
    for adapter in adapters:
        prepare(adapter)
        await times.take(bench.served(adapter.digest))
    return times.summary()


async def measure(work_dir: Path, num_adapters: int, arena_bytes: int) -> dict[str, Any]:
    """First tokens by tier, and the bytes of one adapter."""
    bench = Bench(work_dir, arena_bytes)
    digests = [await bench.publish(work_dir, number) for number in range(num_adapters + 1)]
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
        "base_layers": SHAPE.num_layers,
        "rank": RANK,
        "num_adapters": num_adapters,
        "load_average_at_end": os.getloadavg(),
        "first_token": first,
        "bytes": {
            "weights": 2 * SHAPE.num_adapter_weights(RANK),
            "device": adapters[0].num_pages * page_bytes,
            "host": adapters[0].num_pages * page_bytes,
            "disk": adapters[0].num_bytes,
            "store": (work_dir / "adapter-000" / "adapter_model.safetensors").stat().st_size,
        },
    }


def main() -> None:
    """Measure, print, write `results/<machine>/tiers.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; start empty")
    parser.add_argument("--adapters", type=int, default=9)
    parser.add_argument("--arena-bytes", type=int, default=384 << 20)
    args = parser.parse_args()
    results = asyncio.run(measure(args.work_dir, args.adapters, args.arena_bytes))
    rows = [
        [tier, *(f"{times[name]:.0f}" for name in times)]
        for tier, times in results["first_token"].items()
    ]
    print_table(["FIRST TOKEN FROM", "MEDIAN ms", "SHORTEST", "LONGEST", "PROCESSOR", "COPY"], rows)
    print_table(
        ["TIER", "BYTES OF AN ADAPTER"], [[k, f"{v:,}"] for k, v in results["bytes"].items()]
    )
    print(f"wrote {write_results('tiers', results)}")


if __name__ == "__main__":
    main()
