"""Throughput of one small base with up to 2,000 adapter files.

    python -m benchmarks run serving.many_adapters --work-dir DIR

An engine process serves requests for n adapters (n = 0, 1, 5, 100, 1000, 2000) from files that are
made once (about 22M parameters, ranks 1 to 8 on every linear), through an arena that holds only
some of them. Printed for each n: the throughput over that of n = 0, and the ratio that the bytes of
the executed steps predict,

    base bytes / (base bytes + bytes of the distinct adapters that a step reads)

Then: base traffic compared with an engine that has no adapter; the first token of a request whose
adapter is only on disk, over one whose adapter is resident; and the time of one load.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_model import SHAPES, make_base
from benchmarks.llama import Shape, write_adapter
from benchmarks.machine import options_of, write_results
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.residency import Tier
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.adapters.pack.image import ImageFile, image_path
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Command,
    EngineConfig,
    Prefetch,
    StepOutput,
    Submit,
)
from loraplex_services.worker.types.runner_protocol import LaunchedStep
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.loading import blocks_of, in_blocks

SMALL = Shape("22m", 8192, 384, 1024, 12, 6, 2)
RANKS = (1, 2, 4, 8)
COUNTS = (0, 1, 5, 100, 1000, 2000)
LOADS = 30
BATCH, NUM_PROMPT = 32, 16


def digest_of(index: int) -> str:
    """A made-up digest of an adapter."""
    return "sha256:" + hashlib.sha256(str(index).encode()).hexdigest()


def make_adapter(shape: Shape, folder: Path, rank: int, seed: int) -> Path:
    """Write an adapter in float16 on every linear."""
    return write_adapter(shape, folder, rank, torch.float16, seed=seed)


class Counting(TorchRunner):
    """Notes what steps read."""

    steps: list[tuple[int, int]]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Record the rows of the step, and the bytes of its distinct adapters."""
        slots = {slot for row in plan.rows for slot, _ in row.slots}
        self.steps.append((len(plan.rows), sum(self.slot_bytes[slot] for slot in slots)))
        return super().launch(plan)

    slot_bytes: dict[int, int]

    def enter_adapter(self, slot: int, copied: Any) -> None:
        """Note the size of the adapter in bytes."""
        super().enter_adapter(slot, copied)
        self.slot_bytes[slot] = copied.index.num_bytes


@dataclass
class Bench:
    """An engine, driven without an API server."""

    runner: Counting
    engine: Engine
    folders: list[Path]
    num_pages: list[int]
    shape: Shape = SMALL
    max_rank: int = max(RANKS)
    order: random.Random = field(default_factory=lambda: random.Random(0))
    num_sent: int = 0

    def fetched(self, index: int) -> AdapterFetched:
        """The command that tells the engine where an adapter is."""
        path = str(self.folders[index])
        return AdapterFetched(digest_of(index), path, self.max_rank, self.num_pages[index])

    def request(self, adapter: int | None, max_tokens: int, num_prompt: int = NUM_PROMPT) -> Submit:
        """The command to start a request, with a prompt of its own."""
        self.num_sent += 1
        digests = () if adapter is None else (digest_of(adapter),)
        return Submit(
            request=WorkerRequest(
                request_id=str(self.num_sent),
                prompt_ids=[
                    self.order.randrange(2, self.shape.vocab_size) for _ in range(num_prompt)
                ],
                sampling=SamplingParams(max_tokens, seed=0, ignore_eos=True),
                adapters=AdapterSet(tuple((digest, 1.0) for digest in digests)),
            )
        )

    def step(self, commands: Sequence[Command] = ()) -> StepOutput:
        """Run one step, and wait briefly if there is nothing to compute yet."""
        output = self.engine.step(commands)
        if not output.tokens and not self.engine.may_advance:
            self.runner.await_copies(0.05)
        return output

    def drain(self) -> None:
        """Step until no request is left."""
        while self.engine.has_requests:
            self.step()

    def throughput(self, num_adapters: int, num_requests: int, max_tokens: int) -> dict[str, Any]:
        """Tokens a second, all requests waiting from the start, adapters uniform."""
        commands: list[Command] = []
        for _ in range(num_requests):
            adapter = self.order.randrange(num_adapters) if num_adapters else None
            if adapter is not None:
                commands.append(self.fetched(adapter))
            commands.append(self.request(adapter, max_tokens))
        self.runner.steps.clear()
        gc.collect()
        begin_s = time.perf_counter()
        copies = len(self.step(commands).copies_s)
        while self.engine.has_requests:
            copies += len(self.step().copies_s)
        elapsed_s = time.perf_counter() - begin_s
        base_bytes = 2 * self.shape.num_weights
        num_bytes = statistics.fmean(size for _, size in self.runner.steps)
        return {
            "num_adapters": num_adapters,
            "tokens_per_s": num_requests * max_tokens / elapsed_s,
            "adapter_bytes_a_step": round(num_bytes),
            "predicted": base_bytes / (base_bytes + num_bytes),
            "copies": copies,
            "steps": len(self.runner.steps),
        }

    def first_token_s(self, adapter: int) -> float:
        """Seconds to the first token of one request, next to those that run. It ends there."""
        submit = self.request(adapter, 1)
        begin_s = time.perf_counter()
        output = self.step([self.fetched(adapter), submit])
        while all(token.request_id != submit.request.request_id for token in output.tokens):
            output = self.step()
        return time.perf_counter() - begin_s

    def is_resident(self, adapter: int) -> bool:
        """Whether an adapter is on the device now."""
        return self.engine.cache.tier(digest_of(adapter)) == Tier.DEVICE


def make_config(base: Path, arena_bytes: int, *, drafts: bool = False) -> EngineConfig:
    """The configuration of an engine without prefix cache and, by default, without drafts. Outputs
    of random weights soon repeat, so that drafts would be accepted more often than with real
    weights."""
    return EngineConfig(
        model_dir=str(base),
        device="cpu",
        dtype="float32",
        arena_bytes=arena_bytes,
        max_lora_rank=256,
        max_resident=4096,
        max_num_batched_tokens=512,
        max_num_seqs=BATCH,
        prefix_cache=False,
        drafts=drafts,
    )


def make_bench(base: Path, folders: list[Path], arena_bytes: int, dtype: str = "float32") -> Bench:
    """Load the base; make sure of every image."""
    runner = build_runner(base, device="cpu", dtype=dtype, arena_bytes=arena_bytes)
    runner.__class__ = Counting
    assert isinstance(runner, Counting)
    runner.steps, runner.slot_bytes = [], {}
    engine = Engine(runner, make_config(base, arena_bytes), time.monotonic)
    layout = runner.layout
    packer, num_pages = Packer(runner.model_info().geometry, layout), []
    for folder in folders:
        path = image_path(folder, packer.fingerprint)
        if not path.exists():
            packer.pack(folder).write(path)
        with ImageFile(path) as image:
            num_pages.append(image.index.num_pages)
    return Bench(runner, engine, folders, num_pages)


def compare_counts(bench: Bench, args: Namespace) -> list[dict[str, Any]]:
    """Every n compared with n = 0, measured before and after it."""
    bench.throughput(0, BATCH, 4)
    rows = []
    before = bench.throughput(0, args.requests, args.tokens)
    for count in [n for n in COUNTS if n <= args.adapters]:
        row = bench.throughput(count, args.requests, args.tokens)
        after = bench.throughput(0, args.requests, args.tokens)
        alone = (before["tokens_per_s"] + after["tokens_per_s"]) / 2
        row["over_base"] = row["tokens_per_s"] / alone
        row["of_prediction"] = row["over_base"] / row["predicted"]
        rows.append(row)
        before = after
        print(
            f"{count:>6} {row['tokens_per_s']:>9.0f} {row['over_base']:>8.3f} "
            f"{row['predicted']:>10.3f} {row['of_prediction']:>9.3f} {row['copies']:>7}",
            flush=True,
        )
    return rows


def compare_base(bench: Bench, bare: Bench, args: Namespace) -> float:
    """Base traffic with adapters resident over an engine that never saw one; median of turns."""
    ratios = []
    for _ in range(args.rounds):
        pair = [b.throughput(0, args.requests, args.tokens) for b in (bench, bare)]
        ratios.append(pair[0]["tokens_per_s"] / pair[1]["tokens_per_s"])
    return statistics.median(ratios)


def compare_first_tokens(bench: Bench, num_adapters: int, num_probes: int) -> dict[str, float]:
    """Medians alongside 8 requests that decode, over a full arena; adapters drawn at random."""
    for adapter in range(num_adapters):
        bench.step([bench.fetched(adapter), Prefetch(digest_of(adapter), pin=False)])
        bench.runner.await_copies(1.0)
    for _ in range(8):
        bench.step([bench.request(None, 1000)])
    hits: list[float] = []
    misses: list[float] = []
    for _ in range(num_probes):
        adapter = bench.order.randrange(num_adapters)
        is_hit = bench.is_resident(adapter)
        (hits if is_hit else misses).append(bench.first_token_s(adapter))
    hit_s, miss_s = statistics.median(hits), statistics.median(misses)
    return {
        "hits": len(hits),
        "misses": len(misses),
        "hit_ms": hit_s * 1e3,
        "miss_ms": miss_s * 1e3,
        "miss_over_hit": miss_s / hit_s,
    }


def load_ms(root: Path, shape: Shape, rank: int) -> dict[str, float]:
    """One load from the page cache: copy and tables, and the part on the engine's thread."""
    base = make_base(shape, root)
    runner = build_runner(base, device="cpu", dtype="float32", arena_bytes=256 << 20)
    folder = make_adapter(shape, root / f"{shape.name}-one", rank, seed=1)
    num_pages = runner.pack_adapter(folder).result()
    extents = in_blocks(runner, num_pages, range(blocks_of(runner, num_pages)))
    copies, enters = [], []
    for _ in range(LOADS):
        begin_s = time.perf_counter()
        copied = runner.copy_adapter(folder, extents).result()
        middle_s = time.perf_counter()
        runner.enter_adapter(0, copied)
        copies.append(middle_s - begin_s)
        enters.append(time.perf_counter() - middle_s)
        runner.unload_adapter(0)
    begin_s = time.perf_counter()
    runner.pack_adapter(folder).result()
    return {
        "megabytes": image_path(folder, runner.layout.fingerprint).stat().st_size / 1e6,
        "load_ms": statistics.median(map(sum, zip(copies, enters, strict=True))) * 1e3,
        "copy_ms": statistics.median(copies) * 1e3,
        "enter_ms": statistics.median(enters) * 1e3,
        "pack_ms_once": (time.perf_counter() - begin_s) * 1e3,
    }


def main() -> None:
    """Measure, print, write `results/<machine>/many_adapters.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--arena-bytes", type=int, default=640 << 20)
    args = parser.parse_args()
    base = make_base(SMALL, args.work_dir)
    folders = [
        make_adapter(SMALL, args.work_dir / f"adapter-{i:04d}", RANKS[i % 4], seed=i)
        for i in range(args.adapters)
    ]
    bench = make_bench(base, folders, args.arena_bytes)
    loads = {shape.name: load_ms(args.work_dir, shape, 16) for shape in (SHAPES["135m"], SMALL)}
    print("load, rank 16 on every linear:", json.dumps(loads), flush=True)
    print(f"{'n':>6} {'tokens/s':>9} {'of n=0':>8} {'predicted':>10} {'of that':>9} {'copies':>7}")
    rows = compare_counts(bench, args)
    base_ratio = compare_base(bench, make_bench(base, [], args.arena_bytes // 4), args)
    print(f"base traffic, adapters resident over none: {base_ratio:.3f}")
    first = compare_first_tokens(bench, args.adapters, args.probes)
    print("first token, on disk over resident:", json.dumps(first))
    results = {
        "counts": rows,
        "base_ratio": base_ratio,
        "first_token": first,
        "load": loads,
    }
    write_results("many_adapters", results, args)


if __name__ == "__main__":
    main()
