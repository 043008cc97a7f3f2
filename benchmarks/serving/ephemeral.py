"""Adapters of one request each: how many a second, and whether time and memory stay flat.

    python -m benchmarks run serving.ephemeral [--adapters 100000] [--at-once 8]

The stack is `loraplex up` with the demo base in float32. Each client publishes an adapter from
memory with weights and a name of its own, sends one request for it, and goes on to the next one.
Adapters expire after a minute. The answer must name the digest that was published. Times are
compared between the first and the last tenth of the run, and memory between three tenths and the
end. Results are written after each twentieth, so that a run that is cut off leaves some.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.machine import options_of, read_results, write_results
from benchmarks.serving.live_updates import DEMO, PROMPT, Trainer, summary
from demo.stack import Stack, running_stack
from loraplex import InferenceClient, RegistryClient, Sampling

TTL_S = 60.0
NUM_PARTS = 20
"""Parts of a run, after each of which figures are noted."""
START = 3 * NUM_PARTS // 10 - 1
"""The part after which memory is to stay flat: caches and logs of bounded size are full."""
SETTINGS = {"LORAPLEX_DTYPE": "float32", "LORAPLEX_KV_MEMORY": "64MiB"}


@dataclass(slots=True)
class Run:
    """Measurements, in the order in which requests ended."""

    publish_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    """Seconds from the call of `generate` to the first token."""
    memory: list[Counter[str]] = field(default_factory=list)
    """Resident bytes by process, after each part of the run."""
    processor_s: list[Counter[str]] = field(default_factory=list)
    mislabelled: int = 0
    failed: int = 0


async def drive(
    stack: Stack, num_adapters: int, at_once: int, after_part: Callable[[Run], None]
) -> Run:
    """Publish and use `num_adapters` adapters, `at_once` at a time."""
    run, numbers = Run(), iter(range(num_adapters))
    async with RegistryClient(stack.registry) as registry, InferenceClient(stack.grpc) as gateway:
        clients = [_client(run, registry, gateway, seed, numbers) for seed in range(at_once)]
        watch = asyncio.create_task(_watch(run, num_adapters, after_part))
        await asyncio.gather(*clients)
        watch.cancel()
    return run


async def _client(
    run: Run,
    registry: RegistryClient,
    gateway: InferenceClient,
    seed: int,
    numbers: Iterator[int],
) -> None:
    trainer = Trainer(seed=seed, num_changed=1)  # to walk all takes the client 0.3 ms
    for number in numbers:
        begin_s = time.perf_counter()
        try:
            name = f"once-{number}"
            trainer.step()
            digest = await trainer.publish(registry, name, ttl_s=TTL_S)
            published_s = time.perf_counter()
            stream = gateway.generate(name, PROMPT, Sampling(max_tokens=1))
            chunks = [chunk async for chunk in stream if chunk.token_ids]
        except Exception as error:
            print(f"failed: {error!r}", flush=True)
            run.failed += 1
            continue
        run.publish_s.append(published_s - begin_s)
        run.first_token_s.append(time.perf_counter() - published_s)
        run.mislabelled += chunks[0].digests[0] != digest


def part_size(num_adapters: int) -> int:
    """Adapters in a part of a run."""
    return max(1, num_adapters // NUM_PARTS)


async def _watch(run: Run, num_adapters: int, after_part: Callable[[Run], None]) -> None:
    """Print and note memory and times after each part of the run."""
    size = part_size(num_adapters)
    for part in itertools.count(1):
        while len(run.publish_s) < part * size:
            await asyncio.sleep(0.1)
        memory: Counter[str] = Counter()
        processor_s: Counter[str] = Counter()
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = "client" if process is this else _name(process)
                memory[name] += process.memory_info().rss
                processor_s[name] += sum(process.cpu_times()[:2])
        run.memory.append(memory)
        run.processor_s.append(processor_s)
        shown = {name: round(num_bytes / 2**20) for name, num_bytes in memory.items()}
        publish, first = (
            round(1e3 * statistics.median(times[-size:]), 1)
            for times in (run.publish_s, run.first_token_s)
        )
        print(
            f"{len(run.publish_s)} adapters, {run.failed} failed, publish {publish} ms, "
            f"first token {first} ms, MiB {shown}",
            flush=True,
        )
        after_part(run)


def _name(process: psutil.Process) -> str:
    """`gateway`, `registry`, `engine.process`..."""
    for part in process.cmdline():
        if "loraplex_services." in part:
            return part.partition("loraplex_services.")[2]
    return process.name()


def report(run: Run, elapsed_s: float, num_adapters: int) -> dict[str, object]:
    """The figures of a run of `num_adapters` so far."""
    tenth = max(1, len(run.publish_s) // 10)
    used_s = run.processor_s[-1] - run.processor_s[0]
    num_between = part_size(num_adapters) * (len(run.processor_s) - 1)
    return {
        "adapters": len(run.publish_s),
        "failed": run.failed,
        "mislabelled": run.mislabelled,
        "adapters_per_s": len(run.publish_s) / elapsed_s,
        **{
            f"{what}_{part}_tenth_ms": summary([1e3 * each for each in values[span]])
            for what, values in (("publish", run.publish_s), ("first_token", run.first_token_s))
            for part, span in (("first", slice(tenth)), ("last", slice(-tenth, None)))
        },
        "processor_ms_per_adapter": {
            name: 1e3 * seconds / num_between for name, seconds in used_s.most_common()
        },
        "memory_mib_by_part": {
            name: [round(found[name] / 2**20) for found in run.memory] for name in run.memory[0]
        },
        "memory_growth_from_three_tenths_mib": {
            name: (run.memory[-1][name] - run.memory[START][name]) / 2**20
            for name in run.memory[0]
            if len(run.memory) > START
        },
    }


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(DEMO / "base", "demo", Path(folder), SETTINGS) as stack,
    ):
        begin_s = time.perf_counter()

        def save(run: Run) -> None:
            elapsed_s = time.perf_counter() - begin_s
            figures = report(run, elapsed_s, args.adapters)
            write_results("ephemeral", {"options": vars(args), **figures})

        run = asyncio.run(drive(stack, args.adapters, args.at_once, save))
        # Before the folder is removed, which takes minutes after a long run.
        save(run)
        print(json.dumps(read_results("ephemeral"), indent=1))


if __name__ == "__main__":
    main()
