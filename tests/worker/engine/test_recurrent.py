"""A base with recurrent layers gives the same tokens however its requests are interrupted."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraplex.api.request import KeptPrefix
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor
from loraplex_services.worker.types.messages import Submit
from tests.worker.commands import make_submit
from tests.worker.engine_stage import A, B, Stage
from tests.worker.parity.adapters import FEATURES, make_adapter
from tests.worker.parity.bases import TinyBase, make_base

INVOCATION = FEATURES["delta-nets-activated"]["alora_invocation_tokens"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_base("qwen3.5", tmp_path_factory.mktemp("qwen") / "base")


@pytest.fixture(scope="module")
def files(base: TinyBase) -> Path:
    root = base.folder.parent
    make_adapter(base, "delta-nets", root / A)
    make_adapter(base, "delta-nets-activated", root / B)
    return root


def make_runner(files: Path, **settings: object) -> TorchRunner:
    fields = {"arena_bytes": 2 << 20, "max_num_batched_tokens": 64, "overlap": "off", **settings}
    return build_runner(
        files / "base",
        device="cpu",
        dtype="float32",
        max_resident=8,
        executors=(InlineExecutor(), InlineExecutor()),
        **fields,
    )


@pytest.fixture(scope="module", params=["off", "on"], ids=["one by one", "overlapped"])
def runner(files: Path, request: pytest.FixtureRequest) -> TorchRunner:
    return make_runner(files, overlap=request.param)


def submit(
    name: str, *digests: str, num_prompt: int = 60, output_ids: Sequence[int] = (), **fields: object
) -> Submit:
    """Prompts with a number in their name alike; B is invoked in the middle of its prompts."""
    rng = random.Random(name[-1])
    prompt = [rng.randrange(300) for _ in range(num_prompt)]
    if B in digests:
        prompt[40:43] = INVOCATION
    sampling = SamplingParams(**{"max_tokens": 12, "seed": 1, "ignore_eos": True, **fields})
    return make_submit(name, prompt, sampling, digests, output_ids=list(output_ids))


def changed(submit: Submit, **fields: object) -> Submit:
    return Submit(request=replace(submit.request, **fields))


def mixed() -> list[Submit]:
    return [
        submit("base1"),
        submit("a2", A, num_prompt=130, temperature=0.8),
        submit("b1", B),
        submit("base3", num_prompt=1, temperature=0.7),
        submit("a3", A, num_prompt=16),
    ]


def run(runner: TorchRunner, files: Path, requests: Sequence[Submit], **options: object) -> Stage:
    stage = Stage(runner, files, **options)
    stage.step(*stage.fetched(A, B))
    stage.run(*requests)
    assert not stage.failures, stage.failures
    return stage


def alone(runner: TorchRunner, files: Path, requests: Sequence[Submit]) -> dict[str, list[int]]:
    """The undisturbed outputs: one request after the other, and nothing kept."""
    stage = run(runner, files, (), prefix_cache=False)
    for request in requests:
        stage.run(request)
    stage.close()
    return stage.outputs


@pytest.mark.parametrize("max_step_tokens", [64, 7])
def test_a_mixed_batch_in_chunks_gives_each_request_the_tokens_it_gets_alone(
    files: Path, runner: TorchRunner, max_step_tokens: int
) -> None:
    expected = alone(runner, files, mixed())
    stage = run(runner, files, mixed(), max_step_tokens=max_step_tokens)
    stage.close()
    assert stage.outputs == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


def test_cached_prefixes_change_no_token_and_are_counted(files: Path, runner: TorchRunner) -> None:
    turns = []
    for request in mixed():
        [answer] = alone(runner, files, [request]).values()
        prompt = [*request.request.prompt_ids, *answer, 3, 1, 4]
        turns.append(changed(request, prompt_ids=prompt))
    expected = alone(runner, files, turns)
    stage = run(runner, files, mixed())
    stage.outputs.clear()
    stage.run(*turns)
    stage.close()
    assert stage.outputs == expected
    assert stage.cached == {"base1": 48, "a2": 128, "b1": 48, "base3": 0, "a3": 0}


def test_an_activated_adapter_begins_with_the_state_of_the_base(
    files: Path, runner: TorchRunner
) -> None:
    activated = submit("b1", B)
    [expected] = alone(runner, files, [activated]).values()
    before = submit("base1")
    before = changed(before, prompt_ids=activated.request.prompt_ids[:40])
    stage = run(runner, files, [before])
    stage.run(activated)
    stage.close()
    assert stage.cached == {"base1": 0, "b1": 32} and stage.outputs["b1"] == expected


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preempted_requests_end_with_the_tokens_of_an_undisturbed_run(
    files: Path, overlap: str
) -> None:
    block_bytes = make_runner(files).block_bytes
    runner = make_runner(
        files, arena_bytes=32 * block_bytes, max_num_batched_tokens=4, overlap=overlap
    )
    old = submit("old1", num_prompt=10, max_tokens=150, temperature=0.7)
    young = submit("young2", num_prompt=320, max_tokens=20, temperature=0.7)
    expected = alone_in_small_steps(runner, files, [old, young])
    stage = Stage(runner, files, max_step_tokens=4)
    assert stage.run(old, young) == expected
    assert stage.engine.scheduler.num_preemptions > 0


def alone_in_small_steps(
    runner: TorchRunner, files: Path, requests: Sequence[Submit]
) -> dict[str, list[int]]:
    stage = Stage(runner, files, max_step_tokens=4, prefix_cache=False)
    for request in requests:
        stage.run(request)
    return stage.outputs


def test_a_request_that_another_worker_continues_gets_the_same_tokens(
    files: Path, runner: TorchRunner
) -> None:
    """As after a `kill -9`: prompt and output come again, nothing else."""
    for request in mixed():
        name = request.request.request_id
        [expected] = alone(runner, files, [request]).values()
        for cut in (1, 7):
            stage = run(runner, files, ())
            stage.outputs[name] = expected[:cut]
            stage.run(changed(request, output_ids=expected[:cut]))
            stage.close()
            assert stage.outputs[name] == expected, f"resumed after {cut} tokens"


@pytest.mark.parametrize("max_step_tokens", [pytest.param(64, marks=pytest.mark.long), 7])
def test_a_kept_prefix_goes_on_from_the_state_that_the_earlier_adapter_left(
    files: Path, runner: TorchRunner, base: TinyBase, max_step_tokens: int
) -> None:
    """A request that follows its tag from A to no adapter; PEFT does the same with one cache. What
    A computed behind its last snapshot is computed again."""
    first = submit("a1", A, max_tokens=20)
    stage = run(runner, files, [first], max_step_tokens=max_step_tokens)
    tokens = [*first.request.prompt_ids, *stage.outputs["a1"]]
    kept = (KeptPrefix(first.request.adapters, len(tokens) - 1),)
    with torch.inference_mode():
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), files / A).eval()
        cache = model(torch.tensor([tokens[:48]])).past_key_values
        with model.disable_adapter():
            expected = continued(model, cache, tokens[48:], 30)
    for name, num_known in (("new", 0), ("preempted", 17)):
        stage.outputs[name] = [*stage.outputs["a1"], *expected[:num_known]]
        output_ids = list(stage.outputs[name])
        stage.run(
            changed(
                submit(name),
                prompt_ids=tokens[:60],
                output_ids=output_ids,
                kept=kept,
                sampling=replace(first.request.sampling, max_tokens=50),
            )
        )
        assert stage.outputs[name][20:] == expected, name
    stage.close()


def continued(model: Any, cache: Any, tokens: Sequence[int], num_new: int) -> list[int]:
    """Greedy tokens of transformers after a prefix that is in its cache."""
    found: list[int] = []
    while len(found) < num_new:
        output = model(torch.tensor([list(tokens)]), past_key_values=cache)
        found.append(int(output.logits[0, -1].argmax()))
        cache, tokens = output.past_key_values, found[-1:]
    return found
