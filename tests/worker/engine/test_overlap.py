"""Steps that overlap give the very tokens of steps one by one, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loraplex.api.output import FinishReason
from loraplex_services.worker.types.messages import (
    Cancel,
    Command,
    Submit,
    TokenOutput,
    UnloadAdapter,
)
from tests.worker import tiny
from tests.worker.engine_stage import A, B, Stage, make_runner, submit, write_files

NUM_REQUESTS = 40
BAD_SEQUENCES = (
    *((a, b) for a in range(tiny.VOCAB) for b in range(tiny.VOCAB) if (5 * a + b) % 3 == 0),
    *((a, b, b) for a in range(tiny.VOCAB) for b in range(tiny.VOCAB)),
)
TIGHT_BYTES = 96 * 1024
"""So few blocks that requests and adapters wait for each other."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tiny"))


def random_request(rng: random.Random, name: str) -> Submit:
    """Of all that sampling looks at; stop tokens are many, so that most outputs end early."""
    fields: dict[str, object] = {
        "max_tokens": rng.randrange(1, 30),
        "num_prompt": rng.randrange(1, 40),
    }
    if rng.random() < 0.5:
        fields |= {"temperature": 0.8, "top_p": 0.9}
    if rng.random() < 0.6:
        fields |= {"ignore_eos": False, "stop_token_ids": tuple(range(0, tiny.VOCAB, 7))}
        fields |= {"min_tokens": rng.choice([0, 4])}
    if rng.random() < 0.4:
        fields |= {"frequency_penalty": 0.7, "repetition_penalty": 1.3}
    if rng.random() < 0.3:
        fields |= {"logprobs": 2, "prompt_logprobs": 1}
    if rng.random() < 0.1:
        fields |= {"max_tokens": 0, "prompt_logprobs": 0}
    if rng.random() < 0.2:
        fields |= {"bad_sequences": BAD_SEQUENCES}
    adapters = rng.choice([(), (), (A,), (B,), (A, B)])
    return submit(name, *adapters, seed=rng.randrange(1000), **fields)


@dataclass
class Run:
    """All that a run said, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, TokenOutput] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)


def run(stage: Stage, requests: Sequence[Submit], cancels: dict[int, str]) -> Run:
    """Two requests a step, each ended at its last word; `cancels` by step."""
    said, step, left = Run(), 0, list(requests)
    while left or stage.engine.has_requests:
        commands: list[Command] = [*left[:2], *stage.fetched(A, B)]
        left = left[2:]
        if step in cancels:
            commands.append(Cancel(cancels[step]))
        if step % 7 == 3:
            commands.append(UnloadAdapter(A))
        for token in stage.step(*commands).tokens:
            last = said.last.get(token.request_id)
            assert last is None or not last.finish_reason, "tokens after the end"
            said.tokens.setdefault(token.request_id, []).extend(token.token_ids)
            scored = token.prompt_logprobs.entries() if token.prompt_logprobs else ()
            found = [entry.logprob for entry in (*token.logprobs, *scored) if entry]
            said.logprobs.setdefault(token.request_id, []).extend(found)
            said.last[token.request_id] = token
        step += 1
        assert step < 3000, "the engine does not finish"
    stage.close()
    load = stage.step().load
    assert load.free_blocks == load.total_blocks
    return said


@pytest.mark.parametrize("arena_bytes", [1 << 20, TIGHT_BYTES], ids=["roomy", "tight"])
def test_every_request_gets_the_same_tokens_whether_or_not_steps_overlap(
    files: Path, arena_bytes: int
) -> None:
    rng = random.Random(5)
    requests = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    cancels = {step: str(rng.randrange(NUM_REQUESTS)) for step in range(4, 40, 5)}
    runs = []
    for overlap in ("off", "on"):
        runner = make_runner(files, arena_bytes=arena_bytes, overlap=overlap)
        runs.append(run(Stage(runner, files), requests, cancels))
    plain, overlapped = runs
    complete = set(plain.last) - set(cancels.values())
    assert len(complete) > NUM_REQUESTS // 2
    for name in complete:
        assert overlapped.tokens[name] == plain.tokens[name]
        last, expected = overlapped.last[name], plain.last[name]
        assert last.finish_reason == expected.finish_reason
        assert last.stop_token_id == expected.stop_token_id
        assert overlapped.logprobs[name] == pytest.approx(plain.logprobs[name], abs=1e-5)
    for name in set(cancels.values()):
        tokens = plain.tokens.get(name, []), overlapped.tokens.get(name, [])
        length = min(map(len, tokens))
        assert tokens[0][:length] == tokens[1][:length]
    reasons = [plain.last[name].finish_reason for name in complete]
    assert min(map(reasons.count, (FinishReason.STOP, FinishReason.LENGTH))) > 3
