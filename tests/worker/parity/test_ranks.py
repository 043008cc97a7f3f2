"""Tensor-parallel ranks, which are processes over gloo, give the tokens of transformers + peft."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.parity.bases import BASES
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.suite import (
    Stage,
    check_mixed_batch,
    check_sampled_tokens,
    random_prompt,
    set_stage,
)

NUM_NEW_TOKENS = 24
ALWAYS = {
    ("llama3-rope-tied", 2, False),
    ("llama", 2, True),
    ("qwen3.5-moe", 2, False),
    ("gemma4-all", 2, False),
}
"""Tied tables; recurrent layers, and experts with a shared one; layers of different heads. (base,
ranks, whether both matrices of an adapter are divided)"""


def _params() -> list[object]:
    groups = [(name, size, full) for name in BASES for size in (2, 4) for full in (False, True)]
    assert set(groups) >= ALWAYS
    return [
        pytest.param(
            group,
            marks=[pytest.mark.long] * (group not in ALWAYS),
            id=f"{group[0]}-{group[1]}" + "-full" * group[2],
        )
        for group in groups
    ]


@pytest.fixture(scope="module", params=_params())
def stage(request, tmp_path_factory) -> Iterator[Stage]:
    name, *partition = request.param
    stage = set_stage(name, tmp_path_factory.mktemp(name), *partition)
    yield stage
    stage.driver.runner.close()


@pytest.mark.timeout(300)
def test_ranks_with_mixed_adapters_equal_peft_token_for_token(stage, near_ties):
    check_mixed_batch(stage, near_ties, NUM_NEW_TOKENS)


def test_a_slot_serves_another_adapter_after_it_was_unloaded(stage):
    first, second = list(stage.slots)[:2]
    runner, prompt = stage.driver.runner, random_prompt(random.Random(4))
    expected = _tokens(stage, stage.slots[second], prompt)
    runner.unload_adapter(stage.slots[first])
    stage.driver.load(stage.slots[first], _folder(stage, second))
    assert _tokens(stage, stage.slots[first], prompt) == expected
    runner.unload_adapter(stage.slots[first])
    stage.driver.load(stage.slots[first], _folder(stage, first))


def test_sampled_tokens_do_not_depend_on_the_number_of_ranks(stage):
    check_sampled_tokens(stage)


def _folder(stage: Stage, name: str) -> Path:
    return stage.base.folder.parent / name


def _tokens(stage: Stage, slot: int, prompt: list[int]) -> list[int]:
    [tokens] = stage.driver.run([Job(greedy("r", prompt, 8), ((slot, 1.0),))])
    return tokens
