"""A whole stack on a GPU, over gRPC and HTTP, compared with the same engine in process.

    python -m benchmarks.gpu.stack [--adapters 64] [--device cpu --tiny] [--out DIR]

The stack is `loraplex up`: registry, gateway and worker. Its base has the geometry of Llama-3-8B
and random weights, and its adapters, of rank 16 on every linear, are published through the
registry. The engine in process has the same base and as many adapters. Both are on one device and
take turns. Readers are processes of their own.

`publish_s` and `fetch_s` are seconds of all adapters: uploads, eight at a time; and fetching,
packing and loading on the worker, all at once. `throughput` holds, for each side, requests and
tokens a second of requests that all come at once (medians of rounds), and `first_token` the
milliseconds of a request to its first token, alone and alongside eight that decode, with an adapter
that is resident. `--work-dir DIR --prepare` makes the files and publishes them, and stops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench_runner import free_arena_bytes, parse, runner_parser
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.engine import HOST_CACHE_BYTES, make_bench, make_resident
from benchmarks.gpu.results import Results
from benchmarks.llama import Shape, write_adapter, write_base_config
from benchmarks.serving.many_adapters import Bench
from demo.stack import Stack, running_stack
from loraplex.client.inference_client import InferenceClient
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex_services.worker.types.messages import Cancel

BASE_ID = "base"
NUM_UPLOADS = 8
NUM_READERS = 4
NUM_DECODING = 8
LEAD_S = 0.1
"""Readers need some time to get a job."""
LONG_TOKENS, WARM_S = 3000, 1.0
"""Tokens of the requests that decode alongside others, and seconds until they have begun."""


class Readers:
    """Processes that send requests and read their streams."""

    def __init__(self, addresses: dict[str, str], count: int) -> None:
        """`addresses`: of the gateway, by kind."""
        self._addresses = addresses
        command = [sys.executable, "-m", "benchmarks.gpu.stack_clients"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def start(
        self,
        kind: str,
        requests: Sequence[tuple[str, list[int]]],
        num_tokens: int,
        *,
        one_by_one: bool = False,
    ) -> None:
        """Send all requests, dealt to the processes."""
        job = {"kind": kind, "address": self._addresses[kind], "tokens": num_tokens}
        job["one_by_one"] = one_by_one
        job["begin_s"] = time.monotonic() + LEAD_S
        for i, process in enumerate(self._processes):
            assert process.stdin is not None
            own = {"requests": requests[i :: len(self._processes)]}
            process.stdin.write(json.dumps(job | own) + "\n")
            process.stdin.flush()

    def results(self) -> list[tuple[float, float]]:
        """Seconds to the first and the last token of each request. Raises RuntimeError."""
        found: list[tuple[float, float]] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a reader ended; its error is above")
            found += [(first, last) for first, last in json.loads(line)]
        return found

    def end(self) -> None:
        """End the processes, and with them the requests that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> int:
    """Measure, print, write after every part; returns how many parts failed."""
    args = parse_args()
    shape = SHAPES[args.shape]
    if args.device == "cuda":  # both sides are on one device
        free_bytes, _ = torch.cuda.mem_get_info()
        args.arena_bytes = min(args.arena_bytes, free_arena_bytes(shape) - free_bytes // 2)
    names = "adapters", "rank", "requests", "running", "tokens"
    facts = {name: getattr(args, name) for name in names}
    results = Results(f"stack_{shape.name}", args, shape=shape.name, **facts)
    with ExitStack() as stack:
        root = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = write_base_config(shape, root / "stack-base", 4096)
        folders = adapter_folders(shape, root / "published", args)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = None if args.prepare else pool.submit(make_bench, shape, scratch, args)
        begin_s = time.perf_counter()
        served = stack.enter_context(running_stack(base, BASE_ID, root / "state", settings(args)))
        start_s = time.perf_counter() - begin_s
        published = publish(served, folders, root / "published.json")
        print(f"the stack was ready after {start_s:.1f} s; {published}", flush=True)
        results.note(start_s=start_s, **published)
        if engine is None:
            return 0
        bench = engine.result()
        for part, measure in (("throughput", compare_rates), ("first_token", compare_first)):
            with results.setting(part):
                for row in measure(bench, served, args):
                    results.add(part, row)
    return results.end()


def settings(args: argparse.Namespace) -> dict[str, str]:
    """Settings of the stack, so that its engine is that of the other side."""
    return {
        "LORAPLEX_DEBUG": "load-format=dummy,prefix-cache=false,log-level=info",
        "LORAPLEX_DEVICE": args.device,
        "LORAPLEX_DTYPE": args.dtype,
        "LORAPLEX_KV_MEMORY": str(args.arena_bytes),
        "LORAPLEX_MAX_LORA_RANK": str(args.rank),
        "LORAPLEX_MAX_NUM_SEQS": str(args.running),
        "LORAPLEX_HOST_CACHE_BYTES": str(HOST_CACHE_BYTES),
    }


def adapter_folders(shape: Shape, root: Path, args: argparse.Namespace) -> list[Path]:
    """One adapter with random values, and copies of it whose first values differ."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    first = write_adapter(shape, root / "adapter-0", args.rank, dtype, seed=0)
    config, tensors = (first / f"adapter_{n}" for n in ("config.json", "model.safetensors"))
    data = tensors.read_bytes()
    begin = int.from_bytes(data[:8], "little") + 8
    folders = [first]
    for i in range(1, args.adapters):
        folder = root / f"adapter-{i}"
        folders.append(folder)
        if not (folder / tensors.name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / config.name).write_bytes(config.read_bytes())
            with (folder / tensors.name).open("wb") as file:
                file.write(data[:begin])
                values = torch.full((16,), float(i) / 4096, dtype=dtype).view(torch.uint8)
                file.write(values.numpy().tobytes())
                file.write(memoryview(data)[begin + len(values) :])
    return folders


def publish(served: Stack, folders: Sequence[Path], marker: Path) -> dict[str, float]:
    """Publish and load all adapters; seconds of both. Adapters of an earlier call are published
    already."""

    async def upload(client: RegistryClient, folder: Path, slots: asyncio.Semaphore) -> None:
        async with slots:
            await client.upload(folder, Publication(name=folder.name))

    async def publish_all() -> dict[str, float]:
        begin_s = time.perf_counter()
        if not marker.exists():
            slots = asyncio.Semaphore(NUM_UPLOADS)
            async with RegistryClient(served.registry) as client:
                await asyncio.gather(*(upload(client, folder, slots) for folder in folders))
            marker.write_text(json.dumps({"publish_s": time.perf_counter() - begin_s}))
        begin_s = time.perf_counter()
        async with InferenceClient(served.grpc) as client:
            await asyncio.gather(*(client.fetch(folder.name) for folder in folders))
        return json.loads(marker.read_text()) | {"fetch_s": time.perf_counter() - begin_s}

    return asyncio.run(publish_all())


@contextmanager
def readers(served: Stack, count: int) -> Iterator[Readers]:
    """Processes that read streams of the stack."""
    made = Readers({"grpc": served.grpc, "http": served.http.removeprefix("http://")}, count)
    try:
        yield made
    finally:
        made.end()


def new_requests(bench: Bench, num: int, args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Adapters and prompts as `Bench` draws them."""
    submits = [bench.request(None, 1).request for _ in range(num)]
    adapters = [bench.order.randrange(args.adapters) for _ in submits]
    return [(f"adapter-{i}", each.prompt_ids) for i, each in zip(adapters, submits, strict=True)]


def compare_rates(bench: Bench, served: Stack, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests and tokens a second of each side; the first round warms up."""
    make_resident(bench, args.adapters)
    rates: dict[str, list[float]] = {"engine": [], "grpc": [], "http": []}
    with readers(served, NUM_READERS) as reading:
        for _ in range(args.rounds + 1):
            found = bench.throughput(args.adapters, args.requests, args.tokens)
            rates["engine"].append(found["tokens_per_s"] / args.tokens)
            for kind in ("grpc", "http"):
                reading.start(kind, new_requests(bench, args.requests, args), args.tokens)
                rates[kind].append(args.requests / max(last for _, last in reading.results()))
            print({side: round(found[-1], 1) for side, found in rates.items()}, flush=True)
    rows = []
    for side, found in rates.items():
        rate = statistics.median(found[1:])
        row = {"side": side, "requests_per_s": rate, "tokens_per_s": args.tokens * rate}
        pairs = zip(found[1:], rates["engine"][1:], strict=True)
        rows.append(row | {"of_engine": statistics.median(one / other for one, other in pairs)})
    return rows


def compare_first(
    bench: Bench, served: Stack, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Milliseconds to the first token, alone and alongside requests that decode; medians."""
    for num_decoding in (0, NUM_DECODING):
        row: dict[str, Any] = {"decoding": num_decoding}
        decoding = [bench.request(None, LONG_TOKENS) for _ in range(num_decoding)]
        bench.step(decoding)
        probes = [bench.order.randrange(args.adapters) for _ in range(args.probes)]
        row["engine_ms"] = 1e3 * statistics.median(map(bench.first_token_s, probes))
        bench.step([Cancel(submit.request.request_id) for submit in decoding])
        bench.drain()
        with readers(served, 1) as others, readers(served, 1) as probing:
            prompts = [prompt for _, prompt in new_requests(bench, num_decoding, args)]
            others.start("grpc", [(BASE_ID, prompt) for prompt in prompts], LONG_TOKENS)
            time.sleep(WARM_S)
            for kind in ("grpc", "http"):
                probing.start(kind, new_requests(bench, args.probes, args), 1, one_by_one=True)
                first_s = [first for first, _ in probing.results()]
                row[f"{kind}_ms"] = 1e3 * statistics.median(first_s)
        yield row


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.set_defaults(arena_bytes=40 << 30, dtype="bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--running", type=int, default=64, help="requests of a step (64)")
    parser.add_argument("--requests", type=int, default=256, help="of each round (256)")
    parser.add_argument("--tokens", type=int, default=64, help="of each request (64)")
    parser.add_argument("--probes", type=int, default=40, help="first tokens to time (40)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="keeps files and published adapters")
    parser.add_argument("--prepare", action="store_true", help="publish the adapters and stop")
    tiny = {"adapters": 4, "rank": 8, "running": 16, "requests": 8, "tokens": 4, "probes": 4}
    return parse(parser, **tiny, rounds=1, dtype="float32", arena_bytes=8 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
