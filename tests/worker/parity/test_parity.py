"""Every base x every LoRA feature in one continuous batch == transformers + peft, one by one."""

import random

import pytest

from tests.worker.parity.bases import BASES
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.suite import Stage, check_mixed_batch, make_jobs, random_prompt, set_stage

NUM_NEW_TOKENS = 24
LONG = {
    "llama", "llama-linear-rope", "llama-dynamic-rope", "llama-yarn-biases", "llama-mha-head-dim",
    "mistral-no-window", "qwen2-window", "qwen2-moe", "qwen3-moe", "gemma2", "phi3",
    "phi3-partial-rope", "qwen3.5", "qwen3-next", "mistral3-multimodal", "llava",
    "gemma3-multimodal", "mistral", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe",
    "gemma4", "gemma4-multimodal", "gemma4-unified", "gemma4-moe", "gemma4-all",
    "gemma3", "qwen3.5-moe",
}  # fmt: skip
"""Further variants of a kind: they run with the long tests, and in `write_table`."""


def _params() -> list[object]:
    assert set(BASES) >= LONG
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BASES]


@pytest.fixture(scope="module", params=_params())
def stage(request, tmp_path_factory) -> Stage:
    return set_stage(request.param, tmp_path_factory.mktemp(request.param))


def test_mixed_batch_equals_peft_token_for_token(stage, near_ties):
    check_mixed_batch(stage, near_ties, NUM_NEW_TOKENS)


def test_mixed_batch_equals_each_request_alone(stage):
    num_tokens = NUM_NEW_TOKENS // 2  # alone, every token is a step
    together = make_jobs(stage, 2, num_tokens, stagger=True)
    alone = make_jobs(stage, 2, num_tokens, stagger=False)
    outputs = stage.driver.run([job for _, job in together], chunk=23, overlaps=True)
    for (name, job), expected in zip(alone, outputs, strict=True):
        assert stage.driver.run([job]) == [expected], name


def test_adapters_change_what_the_base_says(stage):
    prompt = random_prompt(random.Random(3))
    jobs = [Job(greedy("base", prompt, 8))]
    jobs += [Job(greedy(name, prompt, 8), ((slot, 1.0),)) for name, slot in stage.slots.items()]
    outputs = stage.driver.run(jobs)
    assert len({tuple(output) for output in outputs}) == len(outputs)
