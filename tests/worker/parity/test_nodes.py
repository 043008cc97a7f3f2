"""Ranks of two machines, which share no files, give the tokens of transformers + peft."""

import random
import shutil
from collections.abc import Iterator

import pytest

from tests.worker.nodes import other_node
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import (
    MAX_LOGPROB_ERROR,
    Stage,
    features_of,
    judge,
    make_jobs,
    random_prompt,
    stage_of,
)

NUM_NEW_TOKENS = 24
GROUPS = [
    ("llama3-rope-tied", 2, False),
    pytest.param(("llama", 4, True), marks=pytest.mark.long),
    pytest.param(("qwen3.5-moe", 2, False), marks=pytest.mark.long),
    pytest.param(("gemma4-all", 2, False), marks=pytest.mark.long),
]
"""Base, ranks, whether both matrices of an adapter are divided."""


@pytest.fixture(scope="module", params=GROUPS)
def stage(request, tmp_path_factory) -> Iterator[Stage]:
    name, num_ranks, fully_sharded = request.param
    root = tmp_path_factory.mktemp(name)
    base = make_base(name, root / "base")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "base"
    shutil.copytree(base.folder, elsewhere)
    with other_node(num_ranks, elsewhere) as (nodes, _):
        stage = stage_of(
            *(base, features_of(base), root),
            num_ranks=num_ranks,
            nodes=nodes,
            fully_sharded_loras=fully_sharded,
        )
        yield stage
        stage.driver.runner.close()


@pytest.mark.timeout(300)
def test_mixed_adapters_equal_peft_token_for_token(stage, near_ties):
    jobs = make_jobs(stage, 1, NUM_NEW_TOKENS, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19, overlaps=True)
    for name, verdict, logprob_error in judge(stage, jobs):
        near_ties.add(verdict)
        assert logprob_error < MAX_LOGPROB_ERROR, name


def test_sampled_tokens_are_those_of_one_rank(stage):
    prompt = random_prompt(random.Random(5))
    alone = parity_runner(stage.base.folder, arena_bytes=16 << 20)
    outputs = []
    for driver in (stage.driver, type(stage.driver)(alone)):
        request = greedy("r", prompt, 12, temperature=1.0, top_p=0.9, top_k=40, seed=11)
        outputs += driver.run([Job(request)])
    assert outputs[0] == outputs[1]
