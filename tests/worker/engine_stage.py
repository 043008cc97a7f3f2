"""An engine with the real runner on a tiny random Llama, driven by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Command,
    StepOutput,
    Submit,
    TokenOutput,
    UnloadAdapter,
)
from tests.worker import tiny
from tests.worker.commands import make_config, make_submit

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def write_files(root: Path) -> Path:
    """A base and two adapters of different ranks."""
    tiny.write_base(root / "base")
    tiny.write_adapter(root / A, seed=1, rank=4)
    tiny.write_adapter(root / B, seed=2, rank=24, targets=("k_proj", "o_proj", "down_proj"))
    return root


def make_runner(
    files: Path,
    arena_bytes: int = 1 << 20,
    max_num_batched_tokens: int = 64,
    overlap: str = "off",
    dtype: str = "float32",
) -> TorchRunner:
    return build_runner(
        files / "base",
        device="cpu",
        dtype=dtype,
        arena_bytes=arena_bytes,
        max_resident=8,
        max_num_batched_tokens=max_num_batched_tokens,
        overlap=overlap,
        executors=(InlineExecutor(), InlineExecutor()),
    )


@dataclass
class Stage:
    """An engine, its clock, and everything it said; `cached` came with the first tokens."""

    runner: TorchRunner
    files: Path
    max_step_tokens: int = 64
    prefix_cache: bool = True
    drafts: bool = True
    lora_bytes: int = 0
    now: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, TokenOutput] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = make_config(
            max_num_batched_tokens=self.max_step_tokens,
            max_num_seqs=min(16, self.max_step_tokens),
            prefix_cache=self.prefix_cache,
            drafts=self.drafts,
            lora_bytes=self.lora_bytes,
        )
        self.engine = Engine(self.runner, config, lambda: self.now)

    def step(self, *commands: Command) -> StepOutput:
        self.now += 0.01
        output = self.engine.step(commands)
        self.engine.check_integrity()
        for token in output.tokens:
            tokens = self.outputs.setdefault(token.request_id, [])
            assert token.output_position == len(tokens)
            self.cached |= {} if tokens else {token.request_id: token.cached_tokens}
            tokens += token.token_ids
            self.last[token.request_id] = token
        self.failures |= {f.request_id: f.error.reason for f in output.failures}
        return output

    def run(self, *commands: Command, max_steps: int = 500) -> dict[str, list[int]]:
        for _ in self.outputs_of(*commands, max_steps=max_steps):
            pass
        return self.outputs

    def outputs_of(self, *commands: Command, max_steps: int = 500) -> Iterable[StepOutput]:
        """Steps until there are no requests."""
        yield self.step(*commands)
        while self.engine.has_requests:
            max_steps -= 1
            assert max_steps, "the engine does not finish"
            yield self.step()

    def blocks_used(self, *commands: Command) -> int:
        load = self.step(*commands).load
        return load.total_blocks - load.free_blocks

    def fetched(self, *digests: str) -> Iterable[AdapterFetched]:
        return [AdapterFetched(digest, str(self.files / digest), 8) for digest in digests]

    def close(self) -> None:
        """Leave the shared runner's tables empty."""
        for digest in (A, B):
            self.step(UnloadAdapter(digest))


def submit(
    request_id: str, *digests: str, seed: int = 0, output_ids: Sequence[int] = (), **fields: object
) -> Submit:
    rng = random.Random(seed)
    prompt_ids = [rng.randrange(tiny.VOCAB - 1) for _ in range(fields.pop("num_prompt", 9))]
    sampling = {"max_tokens": 12, "seed": seed, "ignore_eos": True, **fields}
    left = {k: sampling.pop(k, None) for k in ("remaining_s", "remaining_first_token_s", "came_s")}
    return make_submit(
        request_id,
        prompt_ids,
        SamplingParams(**sampling),
        digests,
        output_ids=list(output_ids),
        **left,
    )


def mixed(**fields: object) -> list[Submit]:
    return [
        submit("base", seed=1, **fields),
        submit("a", A, seed=2, num_prompt=70, **fields),
        submit("b", B, seed=3, **fields),
        submit("ab", A, B, seed=3, **fields),
    ]
