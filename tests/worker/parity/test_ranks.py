"""Tensor-parallel ranks, which are processes over gloo, give the tokens of transformers + peft."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_services.worker.types.sites import LINEAR
from tests.worker.parity.bases import BASES
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.router_choices import chosen_by
from tests.worker.parity.suite import (
    Stage,
    check_mixed_batch,
    check_sampled_tokens,
    random_prompt,
    set_stage,
)

NUM_NEW_TOKENS = 24
DIVISIONS = {
    "one": {},
    "full": {"fully_sharded_loras": True},
    "by-site": {"max_lora_rank": 24_000},
}
"""How adapters are divided. With so large a limit of the rank, both matrices are divided at the
inputs of the tiny bases' blocks, and one at their outputs."""
ALWAYS = {
    ("llama3-rope-tied", 4, "by-site"),
    ("qwen3.5-moe", 2, "one"),
    ("gemma4-all", 2, "one"),
}
"""Tied tables, and adapters with both matrices divided at some sites and one at others; recurrent
layers, and experts with a shared one; layers of different heads. (base, ranks, division)"""


def _params() -> list[object]:
    groups = [(name, size, how) for name in BASES for size in (2, 4) for how in ("one", "full")]
    groups += [
        (name, size, "by-site") for name in ("llama3-rope-tied", "qwen3.5-moe") for size in (2, 4)
    ]
    assert set(groups) >= ALWAYS
    return [
        pytest.param(
            group,
            marks=[pytest.mark.long] * (group not in ALWAYS),
            id=f"{group[0]}-{group[1]}" + (group[2] != "one") * f"-{group[2]}",
        )
        for group in groups
    ]


@pytest.fixture(scope="module", params=_params())
def stage(request, tmp_path_factory) -> Iterator[Stage]:
    name, num_ranks, how = request.param
    stage = set_stage(name, tmp_path_factory.mktemp(name), num_ranks=num_ranks, **DIVISIONS[how])
    sites = stage.driver.runner.layout.sites.sites
    choices = {
        s.divides_both for s in sites if s.kind == LINEAR and (s.cut.outputs or s.cut.inputs)
    }
    assert choices == {"one": {False}, "full": {True}, "by-site": {False, True}}[how]
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


def test_experts_are_those_of_transformers(stage):
    """Each rank has the whole router; the first one says what it chose."""
    routing = stage.driver.runner.model_info().routing
    if routing is None:
        pytest.skip("the base has no experts")
    name = "experts-down"
    request = greedy("experts", random_prompt(random.Random(3)), 4)
    request.routed_from = 0
    job = Job(request, ((stage.slots[name], 1.0),))
    stage.driver.run([job], chunk=23)
    tokens = [*request.prompt_ids, *request.output_ids][:-1]
    chosen = chosen_by(stage.reference.model(name), tokens, routing.num_layers)
    told = b"".join(sample.experts for sample in job.samples)
    assert told == chosen.astype(routing.dtype).tobytes()
