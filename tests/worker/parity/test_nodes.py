"""Ranks of two machines, which share no files, give the tokens of transformers + peft."""

import shutil
from collections.abc import Iterator

import pytest

from tests.worker.nodes import other_node
from tests.worker.parity.bases import make_base
from tests.worker.parity.suite import (
    Stage,
    check_mixed_batch,
    check_sampled_tokens,
    features_of,
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
    check_mixed_batch(stage, near_ties, NUM_NEW_TOKENS)


def test_sampled_tokens_are_those_of_one_rank(stage):
    check_sampled_tokens(stage)
