"""Whether requests get the same tokens and logprobs alone and among others, bit for bit.

    python -m benchmarks.gpu.row_bits [--device cpu --tiny] [--cases REGEX] [--out DIR]

For each base and type, an engine serves random requests that arrive at random times: prompts in
chunks, prefix cache, adapters that are unloaded meanwhile. Then it serves each request alone,
twice. Requests are greedy or sampled, and all want logprobs.

`same_tokens` and `same_bits` count requests with the same tokens, and with the same tokens and
logprobs, among others and alone. `alone_twice` counts those with the same bits in both runs alone.
`largest_difference` is that of two logprobs of a token, up to the first token that differs. Most
bases are the tiny random ones of the parity suite. `wide` has the widths of Llama-3-8B and four
layers, so that the GPU's library has as many kernels to choose from.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench_runner import parse
from benchmarks.gpu.common import options_of
from benchmarks.gpu.results import Results
from benchmarks.llama import Shape, write_adapter, write_base_config
from loraplex.api.output import TokenLogprob
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Command,
    Submit,
    TokenOutput,
    UnloadAdapter,
)
from tests.worker.commands import make_config, make_submit
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base

WIDE = Shape("wide", 32000, 4096, 14336, 4, 32, 8)
TINY_BASES = ("llama", "qwen3", "gemma3", "gemma4", "mixtral", "gpt-oss", "qwen3.5")
CASES = {
    f"{base} {dtype}": (base, dtype)
    for base in (WIDE.name, *TINY_BASES)
    for dtype in ("bfloat16", "float32")
}
FEATURES = ("rank-4-attention", "rank-8-all-linear")
DIGESTS = tuple(f"sha256:{name:0>64}" for name in "ab")
STEP_TOKENS, RUNNING = 96, 32
ARENA_BYTES = 1 << 20
"""The arena of a tiny base, about 100 blocks."""


def main() -> int:
    """Measure the cases in processes of their own, print, write; returns how many failed."""
    args = parse_args()
    cases = [name for name in CASES if re.search(args.cases, name)]
    results = Results("row_bits", args)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        jobs = {pool.submit(measure, *CASES[name], args): name for name in cases}
        for job in as_completed(jobs):
            with results.setting(jobs[job]):
                results.add("cases", job.result())
    return results.end()


def measure(base: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if base == WIDE.name:
            runner = wide_runner(root, dtype, args)
        else:
            runner = tiny_runner(root, base, dtype, args)
        rng = random.Random(f"{base} {dtype}")
        vocabulary = min(runner.model_info().vocab_size, 300)
        requests = [random_request(rng, f"r{i}", vocabulary) for i in range(args.requests)]
        begin_s = time.perf_counter()
        among, num_preemptions = serve(runner, root, requests, rng)
        alone, again = (served_alone(runner, root, requests) for _ in range(2))
        names = list(alone)
        differences = [difference(among[name], alone[name]) for name in names]
        return {
            "base": base,
            "dtype": dtype,
            "requests": len(names),
            "tokens": sum(len(tokens_of(said)) for said in alone.values()),
            "same_tokens": sum(tokens_of(among[n]) == tokens_of(alone[n]) for n in names),
            "same_bits": sum(bits_of(among[n]) == bits_of(alone[n]) for n in names),
            "alone_twice": sum(bits_of(again[n]) == bits_of(alone[n]) for n in names),
            "largest_difference": max(differences),
            "preemptions": num_preemptions,
            "seconds": time.perf_counter() - begin_s,
        }


def wide_runner(root: Path, dtype: str, args: argparse.Namespace) -> TorchRunner:
    """Random weights in the widths of an 8B model."""
    shape = replace(WIDE, vocab_size=320, hidden_size=64, intermediate_size=96)
    shape = shape if args.tiny else WIDE
    base = write_base_config(shape, root / "base", 512)
    for digest, rank in zip(DIGESTS, (8, 32), strict=True):
        write_adapter(shape, root / digest, rank, getattr(torch, dtype), seed=rank)
    return runner_of(base, dtype, args.device, 512 << 20, load_format="dummy")


def tiny_runner(root: Path, name: str, dtype: str, args: argparse.Namespace) -> TorchRunner:
    """A base of the parity suite."""
    base = make_base(name, root / "base")
    for digest, feature in zip(DIGESTS, FEATURES, strict=True):
        make_adapter(base, feature, root / digest)
    return runner_of(base.folder, dtype, args.device, ARENA_BYTES)


def runner_of(
    base: Path, dtype: str, device: str, arena_bytes: int, **settings: Any
) -> TorchRunner:
    """A runner with small steps."""
    return build_runner(
        base,
        device=device,
        dtype=dtype,
        arena_bytes=arena_bytes,
        max_resident=8,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=RUNNING,
        host_cache_bytes=256 << 20,
        **settings,
    )


def random_request(rng: random.Random, name: str, vocabulary: int) -> Submit:
    """Greedy or sampled, with one adapter, two or none; one in three begins as others do."""
    num_prompt, begin = rng.randrange(1, 90), rng.randrange(3)
    shared = [(7 * i + 3) % vocabulary for i in range(40)] if begin == 0 else []
    prompt = shared + [rng.randrange(vocabulary) for _ in range(num_prompt)]
    fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 48), "seed": rng.randrange(1 << 30)}
    if rng.random() < 0.5:
        fields |= {"temperature": 0.8, "top_p": 0.9}
    else:
        fields |= {"temperature": 0.0}
    if rng.random() < 0.2:
        fields |= {"frequency_penalty": 0.7}
    fields |= {"logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    adapters = rng.choice(((), DIGESTS[:1], DIGESTS[1:], DIGESTS))
    return make_submit(name, prompt, SamplingParams(**fields), adapters)


def served_alone(
    runner: TorchRunner, root: Path, requests: Sequence[Submit]
) -> dict[str, list[TokenOutput]]:
    """The outputs of each request when nothing else runs."""
    said: dict[str, list[TokenOutput]] = {}
    for request in requests:
        said |= serve(runner, root, [request], None)[0]
    return said


def serve(
    runner: TorchRunner, root: Path, requests: Sequence[Submit], rng: random.Random | None
) -> tuple[dict[str, list[TokenOutput]], int]:
    """The outputs of a new engine by request, and its preemptions. All requests come at once, or,
    with `rng`, at random times and with a prefix cache."""
    config = make_config(
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=RUNNING, prefix_cache=rng is not None
    )
    engine = Engine(runner, config, time.monotonic)
    fetched = [AdapterFetched(digest, str(root / digest), 64) for digest in DIGESTS]
    said: dict[str, list[TokenOutput]] = {}
    left = list(requests)

    def step(commands: Sequence[Command]) -> None:
        output = engine.step([*commands, *fetched])
        if output.failures:
            raise RuntimeError(f"a request fails: {output.failures[0].error}")
        for token in output.tokens:
            said.setdefault(token.request_id, []).append(token)
        if not output.tokens and not engine.may_advance:
            runner.await_copies(0.05)

    while left or engine.has_requests:
        num_new = len(left) if rng is None else rng.choice((0, 0, 1, 8))
        commands: list[Command] = list(left[:num_new])
        left = left[num_new:]
        if rng is not None and rng.random() < 0.05:
            commands.append(UnloadAdapter(rng.choice(DIGESTS)))
        step(commands)
    engine.step([UnloadAdapter(digest) for digest in DIGESTS])
    return said, engine.scheduler.num_preemptions


def tokens_of(said: Sequence[TokenOutput]) -> list[int]:
    """The token ids of the output."""
    return [token_id for output in said for token_id in output.token_ids]


def logprobs_of(said: Sequence[TokenOutput]) -> list[TokenLogprob]:
    """The logprobs of prompt and output."""
    prompt = said[0].prompt_logprobs
    assert prompt is not None
    known = (entry for entry in prompt.entries() if entry is not None)
    return [*known, *(entry for output in said for entry in output.logprobs)]


def bits_of(said: Sequence[TokenOutput]) -> tuple[list[int], list[TokenLogprob]]:
    """All that the outputs of a request say."""
    return tokens_of(said), logprobs_of(said)


def difference(one: Sequence[TokenOutput], other: Sequence[TokenOutput]) -> float:
    """The largest of two logprobs of a token, up to the first token that differs."""
    largest = 0.0
    for a, b in zip(logprobs_of(one), logprobs_of(other), strict=True):
        if a.token_id != b.token_id:
            break
        largest = max(largest, abs(a.logprob - b.logprob))
    return largest


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = options_of(__doc__)
    parser.add_argument("--cases", default="", help="regular expression (all cases)")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--processes", type=int, default=8, help="cases at the same time (8)")
    return parse(parser, requests=6, processes=2, cases="^(wide|llama) ")


if __name__ == "__main__":
    raise SystemExit(main())
