"""An adapter that is updated while it serves: time to the first new token, and wrong labels.

    python -m benchmarks run serving.live_updates [--updates 1000] [--clients 4] [--others 2]
        [--model 135m --work-dir DIR] [--pause-s 0.01]

The stack is `loraplex up` with the demo base in float32, or with a base of 135M random weights,
which is kept in DIR, and an adapter of rank 8 on its queries and values. One trainer publishes
versions of one adapter from memory, each with weights of its own, and clients stream completions of
it, half of them following the tag. Another process streams an adapter that does not change, as
another tenant would, and notes the gaps between its tokens. After the last update, every answer is
scored again under each digest that it names: a token is mislabelled if the logprob that came with
it is not the one of those weights. A control scores answers under another version.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.cpu_model import SHAPES, make_base
from benchmarks.llama import write_adapter
from benchmarks.machine import options_of, write_results
from benchmarks.measuring import p99
from demo.stack import running_stack
from loraplex import InferenceClient, Publication, RegistryClient, Sampling
from loraplex.client.generation import CompletionChunk

DEMO = Path(__file__).parents[2] / "demo"
ADAPTER = DEMO / "adapters" / "upper"
LARGE = SHAPES["135m"]
NAME, STEADY = "Policy", "steady"
PROMPT = tuple(b"zamihi 19=")
TOLERANCE = 1e-4
NUM_TOKENS = 48
NUM_CONTROLS = 20
NUM_CHECKERS = 4
MAX_TRIES = 5
"""Following requests for each one that is still running when the new version is there."""


class Trainer:
    """Weights that change with every step."""

    def __init__(
        self, folder: Path = ADAPTER, seed: int = 0, num_changed: int | None = None
    ) -> None:
        """
        Args:
            folder: the adapter to begin with.
            num_changed: tensors that a step changes; None = all.
        """
        self._tensors = load_file(folder / "adapter_model.safetensors")
        self._config = json.loads((folder / "adapter_config.json").read_bytes())
        self._changed = list(self._tensors)[:num_changed]
        self._generator = torch.Generator().manual_seed(seed)

    def step(self) -> dict[str, torch.Tensor]:
        """Move the weights a little at random."""
        for name in self._changed:
            tensor = self._tensors[name]
            noise = torch.randn(tensor.shape, generator=self._generator).to(tensor.dtype)
            self._tensors[name] = tensor + 0.02 * tensor.float().std().to(tensor.dtype) * noise
        return self._tensors

    async def publish(self, registry: RegistryClient, name: str = NAME, **options: Any) -> str:
        """The digest of a new version."""
        done = await registry.publish(self._tensors, self._config, Publication(name, **options))
        return done.version.digest


@dataclass(slots=True)
class Tally:
    """The counts and times of a run."""

    updates: int = 0
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    mislabelled: int = 0
    bit_equal: int = 0
    switched: int = 0
    """Requests that more than one version computed."""
    controls: int = 0
    controls_told_apart: int = 0
    still_gaps_s: list[float] = field(default_factory=list)
    """Between tokens of the adapter that does not change, before the first update."""
    steady_gaps_s: list[float] = field(default_factory=list)
    """Seconds between its tokens during updates."""
    publish_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: tokens, logprobs, and the digest of the weights of each token."""

    output: list[int]
    logprobs: list[float]
    labels: list[str]


async def drive(
    grpc: str,
    registry_address: str,
    *,
    updates: int,
    clients: int,
    others: int,
    still_s: float = 0.0,
    pause_s: float = 0.01,
    adapter: Path = ADAPTER,
) -> Tally:
    """Serve for `still_s` seconds, then publish `updates` versions under the same load, with a
    pause after each; check every answer."""
    tally, done, answers = Tally(), asyncio.Event(), list[Answer]()
    async with RegistryClient(registry_address) as registry, InferenceClient(grpc) as gateway:
        trainer = Trainer(adapter)
        await trainer.publish(registry, STEADY)
        trainer.step()
        seen = [await trainer.publish(registry)]
        neighbour = Neighbour(grpc, others)
        await neighbour.begin()
        running = (_client(gateway, tally, done, answers, index) for index in range(clients))
        tasks = [asyncio.create_task(each) for each in running]
        while tally.requests + tally.failed < clients:  # or the updates might be over before
            await asyncio.sleep(0.01)
        times_s = [time.perf_counter()]
        await asyncio.sleep(still_s)
        times_s.append(time.perf_counter())
        for _ in range(updates):
            await asyncio.to_thread(trainer.step)
            begin_s = time.perf_counter()
            seen.append(await trainer.publish(registry, keep_versions=1000))
            tally.publish_s.append(time.perf_counter() - begin_s)
            tally.updates += 1
            await asyncio.sleep(pause_s)
        times_s.append(time.perf_counter())
        done.set()
        gaps_s = await neighbour.end()
        tally.still_gaps_s, tally.steady_gaps_s = (
            [gap_s for at_s, gap_s in gaps_s if begin_s <= at_s < end_s]
            for begin_s, end_s in pairwise(times_s)
        )
        await asyncio.gather(*tasks)
        shares = [answers[index::NUM_CHECKERS] for index in range(NUM_CHECKERS)]
        await asyncio.gather(*(_check_all(gateway, share, tally, seen) for share in shares))
    return tally


class Neighbour:
    """The process of another tenant."""

    def __init__(self, grpc: str, num_streams: int) -> None:
        """Streams an adapter that does not change, `num_streams` at a time."""
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        arguments = grpc, num_streams, other_end
        self._process = context.Process(target=_stream_until_told, args=arguments, daemon=True)

    async def begin(self) -> None:
        """Returns once it streams."""
        self._process.start()
        await asyncio.to_thread(self._connection.recv)

    async def end(self) -> list[tuple[float, float]]:
        """When each gap ended, in seconds of the clock that all processes share, and its length."""
        self._connection.send(None)
        gaps_s: list[tuple[float, float]] = await asyncio.to_thread(self._connection.recv)
        self._process.join()
        return gaps_s


def _stream_until_told(grpc: str, num_streams: int, connection: Connection) -> None:
    connection.send(asyncio.run(_gaps(grpc, num_streams, connection)))


async def _gaps(grpc: str, num_streams: int, connection: Connection) -> list[tuple[float, float]]:
    gaps_s: list[tuple[float, float]] = []
    done = asyncio.Event()
    async with InferenceClient(grpc) as gateway:
        streams = [_steady(gateway, gaps_s, done) for _ in range(num_streams)]
        tasks = [asyncio.create_task(stream) for stream in streams]
        connection.send(None)
        await asyncio.to_thread(connection.recv)
        done.set()
        await asyncio.gather(*tasks)
    return gaps_s


async def _steady(
    gateway: InferenceClient, gaps_s: list[tuple[float, float]], done: asyncio.Event
) -> None:
    """One stream after another."""
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    while not done.is_set():
        last_s = 0.0
        async for _ in gateway.generate(STEADY, PROMPT, sampling):
            now_s = time.perf_counter()
            if last_s:
                gaps_s.append((now_s, now_s - last_s))
            last_s = now_s


async def _client(
    gateway: InferenceClient, tally: Tally, done: asyncio.Event, answers: list[Answer], index: int
) -> None:
    """One request after another; odd clients follow the tag."""
    policy = "follow" if index % 2 else "finish"
    number = 0
    while not done.is_set():
        number += 1
        sampling = Sampling(
            max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=1000 * index + number
        )
        try:
            stream = gateway.generate(NAME, PROMPT, sampling, on_update=policy)
            answers.append(_answer([chunk async for chunk in stream]))
            tally.requests += 1
        except Exception as error:
            print(f"failed: {error}")
            tally.failed += 1


def _answer(chunks: list[CompletionChunk]) -> Answer:
    output = [token_id for chunk in chunks for token_id in chunk.token_ids]
    logprobs = [entry.logprob for chunk in chunks for entry in chunk.logprobs]
    labels = [chunk.digests[0] for chunk in chunks for _ in chunk.token_ids]
    assert len(output) == len(logprobs) == NUM_TOKENS, "tokens are missing"
    return Answer(output, logprobs, labels)


async def _check_all(
    gateway: InferenceClient, answers: list[Answer], tally: Tally, seen: list[str]
) -> None:
    for answer in answers:
        await _check(gateway, answer, tally, seen)


async def _check(gateway: InferenceClient, answer: Answer, tally: Tally, seen: list[str]) -> None:
    """Compare the logprobs of an answer with those of the weights that it names."""
    output, labels = answer.output, answer.labels
    tally.switched += len(set(labels)) > 1
    scores = {digest: await _score(gateway, digest, output) for digest in set(labels)}
    for position, (digest, logprob) in enumerate(zip(labels, answer.logprobs, strict=True)):
        tally.tokens += 1
        tally.mislabelled += abs(scores[digest][position] - logprob) > TOLERANCE
        tally.bit_equal += scores[digest][position] == logprob
    if tally.controls < NUM_CONTROLS:
        for other in [digest for digest in seen if digest not in labels][-1:]:
            tally.controls += 1
            wrong = await _score(gateway, other, output)
            differences = [abs(a - b) for a, b in zip(wrong, answer.logprobs, strict=True)]
            tally.controls_told_apart += max(differences) > TOLERANCE


async def _score(gateway: InferenceClient, digest: str, output: list[int]) -> list[float]:
    """Logprobs of an output under one version."""
    sampling = Sampling(max_tokens=1, prompt_logprobs=0)
    entries = []
    stream = gateway.generate(f"{NAME}@{digest}", [*PROMPT, *output], sampling)
    async for chunk in stream:
        entries += chunk.prompt_logprobs
    return [entry.logprob for entry in entries[-len(output) :] if entry is not None]


async def first_tokens(
    grpc: str, registry_address: str, rounds: int, adapter: Path = ADAPTER
) -> dict[str, list[float]]:
    """Milliseconds from the call of `publish` to the first token of the new weights: of a request
    that is sent after it, and of one that runs and follows the tag. The trainer's step is made
    before."""
    new_ms: list[float] = []
    follow_ms: list[float] = []
    async with RegistryClient(registry_address) as registry, InferenceClient(grpc) as gateway:
        trainer = Trainer(adapter, seed=1)
        await _score(gateway, await trainer.publish(registry), [])  # connects the client
        for _ in range(rounds):
            await asyncio.to_thread(trainer.step)
            begin_s = time.perf_counter()
            digest = await trainer.publish(registry, keep_versions=8)
            stream = gateway.generate(f"{NAME}@{digest}", PROMPT, Sampling(max_tokens=1))
            async for chunk in stream:
                if chunk.token_ids:
                    new_ms.append(1e3 * (time.perf_counter() - begin_s))
        for _ in range(MAX_TRIES * rounds):
            if (elapsed_ms := await _followed_ms(gateway, registry, trainer)) is not None:
                follow_ms.append(elapsed_ms)
            if len(follow_ms) == rounds:
                break
    return {"new_request_ms": new_ms, "following_request_ms": follow_ms}


async def _followed_ms(
    gateway: InferenceClient, registry: RegistryClient, trainer: Trainer
) -> float | None:
    """None if the request ended before the new version was published."""
    publishing: asyncio.Task[str] | None = None
    begin_s = 0.0
    first = ""
    await asyncio.to_thread(trainer.step)
    sampling = Sampling(max_tokens=400, ignore_eos=True)
    stream = gateway.generate(NAME, PROMPT, sampling, on_update="follow")
    with suppress(GeneratorExit):
        async for chunk in stream:
            first = first or chunk.digests[0]
            if publishing is None:
                begin_s = time.perf_counter()
                publishing = asyncio.create_task(trainer.publish(registry, keep_versions=8))
            elif chunk.digests[0] != first:
                elapsed_ms = 1e3 * (time.perf_counter() - begin_s)
                await stream.aclose()
                await publishing
                return elapsed_ms
    if publishing is not None:
        await publishing
    return None


def summary(values: list[float]) -> Mapping[str, float]:
    """Median and 99th percentile."""
    return {"p50": round(statistics.median(values), 2), "p99": round(p99(values), 2)}


def _large(root: Path) -> tuple[Path, Path]:
    """The base of 135M weights, and an adapter for it that is sent in one call."""
    folder, targets = root / f"{LARGE.name}-lora-q-v", ("q_proj", "v_proj")
    adapter = write_adapter(LARGE, folder, 8, torch.bfloat16, seed=0, targets=targets)
    return make_base(LARGE, root), adapter


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--others", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--still-s", type=float, default=20.0, help="seconds without updates")
    parser.add_argument("--pause-s", type=float, default=0.01, help="seconds after each update")
    parser.add_argument("--model", choices=("demo", LARGE.name), default="demo")
    parser.add_argument("--work-dir", type=Path, help=f"keep the base of {LARGE.name} here")
    args = parser.parse_args()
    base, adapter, dtype = DEMO / "base", ADAPTER, "float32"
    if args.model != "demo":
        base, adapter, dtype = *_large(args.work_dir), "auto"
    settings = {"LORAPLEX_DTYPE": dtype, "LORAPLEX_KV_MEMORY": "256MiB"}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(base, args.model, Path(folder), settings) as stack,
    ):
        latencies = asyncio.run(first_tokens(stack.grpc, stack.registry, args.rounds, adapter))
        tally = asyncio.run(
            drive(
                stack.grpc,
                stack.registry,
                updates=args.updates,
                clients=args.clients,
                others=args.others,
                still_s=args.still_s,
                pause_s=args.pause_s,
                adapter=adapter,
            )
        )
    tenth = max(1, len(tally.publish_s) // 10)
    result = {
        "options": {key: value for key, value in vars(args).items() if key != "work_dir"},
        **{name: summary(values) for name, values in latencies.items()},
        "publish_under_load_ms": summary([1e3 * each for each in tally.publish_s]),
        "publish_first_tenth_ms": summary([1e3 * each for each in tally.publish_s[:tenth]]),
        "publish_last_tenth_ms": summary([1e3 * each for each in tally.publish_s[-tenth:]]),
        "gap_without_updates_ms": summary([1e3 * gap for gap in tally.still_gaps_s]),
        "gap_with_updates_ms": summary([1e3 * gap for gap in tally.steady_gaps_s]),
        **{
            name: getattr(tally, name)
            for name in (
                *("updates", "requests", "failed", "tokens", "mislabelled", "bit_equal"),
                *("switched", "controls", "controls_told_apart"),
            )
        },
    }
    print(json.dumps(result, indent=1))
    write_results("live_updates" + ("" if args.model == "demo" else f"_{args.model}"), result)


if __name__ == "__main__":
    main()
