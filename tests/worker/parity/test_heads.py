"""Scores and vectors, next to requests that generate == transformers + peft, class by class."""

from __future__ import annotations

import pytest

from loraplex_services.worker.adapters.pack.packing import NeedsBase, Packer
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.heads import (
    FEATURES,
    classifier,
    save_random,
    score_errors,
    score_jobs,
    set_head_stage,
    vector_errors,
)
from tests.worker.parity.runners import parity_runner

FAMILIES = [
    "llama", "qwen2", "mistral", "gemma2", "gemma3", "qwen3", "phi3", "mixtral", "qwen2-moe",
    "qwen3-moe",
]  # fmt: skip
LONG = {"qwen3", "phi3", "mixtral", "qwen2-moe", "qwen3-moe"}
MAX_ERROR = 1e-4
GENERATOR = "rank-4-attention"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FAMILIES],
)
def base(request, tmp_path_factory):
    return make_base(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.filterwarnings("ignore")
def test_heads_score_in_a_batch_with_generation_as_transformers_does(base, tmp_path):
    driver = Driver(parity_runner(base.folder, arena_bytes=32 << 20))
    driver.load(0, make_adapter(base, GENERATOR, tmp_path / GENERATOR))
    stage = set_head_stage(base, driver, tmp_path)
    scored = score_jobs(stage)
    writing = [
        Job(greedy(f"g{slots}", list(range(9 + len(slots))), 12), slots)
        for slots in ((), ((0, 1.0),))
    ]
    again = [greedy(job.request.request_id, job.request.prompt_ids, 12) for job in writing]
    alone = driver.run(
        [Job(request, job.slots) for request, job in zip(again, writing, strict=True)]
    )
    assert driver.run([*writing, *[job for _, job in scored]], chunk=19)[:2] == alone
    assert alone[0] != alone[1]
    for name, error in score_errors(stage, scored).items():
        assert error < MAX_ERROR, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [1000, 7])
def test_vectors_of_an_embedding_model_are_its_states_or_their_mean(base, tmp_path, chunk):
    runner = parity_runner(base.folder, arena_bytes=16 << 20)
    for pooling, error in vector_errors(base, Driver(runner), tmp_path / "own", chunk).items():
        assert error < MAX_ERROR, pooling


@pytest.mark.filterwarnings("ignore")
def test_a_plain_lora_with_a_head_is_packed_without_the_base(base, tmp_path):
    runner = parity_runner(base.folder, arena_bytes=4 << 20)
    for name, needs_base in (("plain", False), ("dora", True)):
        fields = {**FEATURES[name], "target_modules": ["v_proj"], "task_type": "SEQ_CLS"}
        save_random(classifier(base, name), tmp_path / name, 1, **fields)
        layout, geometry = runner.layout, runner.model_info().geometry
        packer = Packer(geometry, layout)
        if needs_base:
            with pytest.raises(NeedsBase):
                packer.pack(tmp_path / name)
        else:
            assert packer.pack(tmp_path / name).index.facts.task == "SEQ_CLS"
