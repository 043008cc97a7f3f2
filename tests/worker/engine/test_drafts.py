"""Drafts change how many steps an output takes, and nothing of the output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from loraplex_services.worker.scheduling import drafts as drafting
from loraplex_services.worker.types.messages import (
    Cancel,
    Command,
    Submit,
    TokenOutput,
    UnloadAdapter,
)
from tests.worker.engine_stage import A, B, Stage, make_runner, submit, write_files
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import BASES, LIBRARY_BASES, make_base

NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tiny"))


def random_request(
    rng: random.Random, name: str, adapters: Sequence[tuple[str, ...]] = ((), (A,), (B,), (A, B))
) -> Submit:
    """Of few tokens, so that outputs repeat themselves."""
    fields: dict[str, object] = {
        "max_tokens": rng.randrange(1, 60),
        "num_prompt": rng.randrange(1, 40),
        "allowed_token_ids": (1, 2, 3, 7, 9),
    }
    if rng.random() < 0.5:
        fields |= {"temperature": 0.8, "top_p": 0.9}
    if rng.random() < 0.3:
        fields |= {"ignore_eos": False, "stop_token_ids": (9,), "min_tokens": 9}
    if rng.random() < 0.2:
        fields |= {"frequency_penalty": 0.7}
    if rng.random() < 0.2:
        fields |= {"bad_sequences": ((1, 2), (2, 2, 1))}
    if rng.random() < 0.5:
        fields |= {"logprobs": 2, "prompt_logprobs": 1}
    return submit(name, *rng.choice(adapters), seed=rng.randrange(1000), **fields)


def run(
    stage: Stage, requests: Sequence[Submit], cancelled: Sequence[str] = (), least: int = 8
) -> dict[str, list[TokenOutput]]:
    said: dict[str, list[TokenOutput]] = {}
    left, step, num_drafted, num_accepted = list(requests), 0, 0, 0
    while left or stage.engine.has_requests:
        fetched = stage.fetched(A, B) if (stage.files / A).exists() else ()
        commands: list[Command] = [*left[:1], *fetched]
        left = left[1:]
        if step % 5 == 3 and step // 5 < len(cancelled):
            commands.append(Cancel(cancelled[step // 5]))
        output = stage.step(*commands)
        num_drafted, num_accepted = num_drafted + output.drafted, num_accepted + output.accepted
        for token in output.tokens:
            said.setdefault(token.request_id, []).append(token)
        step += 1
        assert step < 3000, "the engine does not finish"
    assert (least < num_accepted < num_drafted) if stage.drafts else num_drafted == 0
    return said


def flat(outputs: Sequence[TokenOutput]) -> tuple[object, ...]:
    """All that a request was told, whatever steps it came in."""
    ids = [token_id for output in outputs for token_id in output.token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    last = outputs[-1]
    return ids, logprobs, outputs[0].prompt_logprobs, last.finish_reason, last.stop_token_id


@pytest.mark.parametrize(("arena_bytes", "dtype"), [(1 << 20, "bfloat16"), (96 * 1024, "float32")])
def test_outputs_and_logprobs_are_bit_for_bit_those_without_drafts(
    files: Path, arena_bytes: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)  # large steps have drafts, too
    rng = random.Random(7)
    requests = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    cancelled = ("4", "11")
    said = []
    for drafts in (False, True):
        stage = Stage(
            make_runner(files, arena_bytes=arena_bytes, dtype=dtype), files, drafts=drafts
        )
        said.append(run(stage, requests, cancelled))
        stage.close()
    plain, drafted = said
    for name in plain.keys() - set(cancelled):
        assert flat(drafted[name]) == flat(plain[name])


@pytest.mark.parametrize(("dtype", "drafts"), [("float32", False), ("bfloat16", True)])
def test_outputs_are_bit_for_bit_those_of_each_request_alone(
    files: Path, dtype: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)
    rng = random.Random(11)
    requests = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    stage = Stage(make_runner(files, 96 * 1024, dtype=dtype), files, drafts=drafts)
    said: dict[str, list[TokenOutput]] = {}
    left = list(requests)
    while left or stage.engine.has_requests:
        num_new = rng.choice((0, 0, 1, 4))
        commands: list[Command] = [*left[:num_new], *stage.fetched(A, B)]
        left = left[num_new:]
        if rng.random() < 0.1:
            commands.append(UnloadAdapter(rng.choice((A, B))))
        for token in stage.step(*commands).tokens:
            said.setdefault(token.request_id, []).append(token)
    stage.close()
    alone = Stage(make_runner(files, dtype=dtype), files, prefix_cache=False, drafts=False)
    for request in requests:
        own = run(alone, [request])
        [(name, outputs)] = own.items()
        assert flat(said[name]) == flat(outputs)
    alone.close()


@pytest.fixture(scope="module")
def recurrent_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qwen")
    base = make_base("qwen3.5", root / "base")
    make_adapter(base, "delta-nets", root / A)
    make_adapter(base, "rank-16-mlp", root / B)
    return root


@pytest.mark.parametrize(("num_blocks", "dtype"), [(200, "bfloat16"), (30, "float32")])
def test_states_of_recurrent_layers_are_those_without_drafts(
    recurrent_files: Path, num_blocks: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)
    rng = random.Random(7)
    requests = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    block_bytes = make_runner(recurrent_files, dtype=dtype).block_bytes
    said = []
    for drafts in (False, True):
        runner = make_runner(recurrent_files, arena_bytes=num_blocks * block_bytes, dtype=dtype)
        stage = Stage(runner, recurrent_files, max_step_tokens=24, drafts=drafts)
        said.append({name: flat(outputs) for name, outputs in run(stage, requests).items()})
        stage.close()
    assert said[0] == said[1]


def test_a_preempted_request_with_drafts_computes_its_state_again(recurrent_files: Path) -> None:
    block_bytes = make_runner(recurrent_files).block_bytes
    fields = {"allowed_token_ids": (1, 2, 3), "logprobs": 1, "temperature": 0.8}
    old = submit("old", num_prompt=10, max_tokens=150, **fields)
    young = submit("young", A, seed=1, num_prompt=320, max_tokens=40, **fields)
    said = []
    for drafts in (False, True):
        runner = make_runner(recurrent_files, 36 * block_bytes, max_num_batched_tokens=6)
        stage = Stage(runner, recurrent_files, max_step_tokens=6, drafts=drafts)
        outputs = run(stage, [old, young], least=3)
        said.append({name: flat(own) for name, own in outputs.items()})
    assert said[0] == said[1]
    assert stage.engine.scheduler.num_preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*BASES, *LIBRARY_BASES])
def test_bases_of_every_family_give_the_same_bits(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)
    monkeypatch.setattr(drafting.Drafts, "_time", lambda _, num_rows: 1000.0 + num_rows)
    make_base(name, tmp_path / "base")
    rng = random.Random(3)
    requests = [random_request(rng, str(i), [()]) for i in range(8)]
    runner = make_runner(tmp_path, arena_bytes=1 << 22, dtype=dtype)
    info, config = runner.model_info(), runner._model.config
    assert info.verifies_drafts == (name in BASES and not config.own_kv_heads)
    if info.verifies_drafts and info.rope_switch_len is None:
        plain, drafted = (
            run(Stage(runner, tmp_path, drafts=drafts), requests) for drafts in (False, True)
        )
        assert {n: flat(said) for n, said in drafted.items()} == {
            n: flat(said) for n, said in plain.items()
        }
