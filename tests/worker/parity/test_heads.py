"""Scores and vectors, next to requests that generate == transformers + peft, class by class."""

from __future__ import annotations

import random

import pytest

from services.worker.adapters.contents import ModuleReader
from services.worker.adapters.packing import NeedsBase, Packer
from services.worker.request import Pooling
from services.worker.runner import build_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.heads import (
    FEATURES,
    NUM_LABELS,
    classifier,
    embedder,
    logits_of,
    save_random,
    states_of,
)

FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "qwen3", "phi3", "mixtral"]
LONG = {"qwen3", "phi3", "mixtral"}
MAX_ERROR = 1e-4
GENERATOR = "rank-4-attention"


def pooled(name: str, prompt: list[int], slot: int | None, pooling: Pooling, arrival: int) -> Job:
    request = greedy(name, prompt, 0)
    request.pooling = pooling
    return Job(request, () if slot is None else ((slot, 1.0),), arrival)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FAMILIES],
)
def base(request, tmp_path_factory):
    return make_base(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.filterwarnings("ignore")
def test_heads_score_beside_requests_that_generate_as_transformers_does(base, tmp_path):
    driver = Driver(build_runner(base.folder, device="cpu", dtype="float32", arena_bytes=32 << 20))
    generator = make_adapter(base, GENERATOR, tmp_path / GENERATOR)
    driver.load(0, generator)
    tuned = {}
    for slot, (name, fields) in enumerate(FEATURES.items(), start=1):
        if (
            base.model.config.model_type == "mixtral"
            and fields.get("target_modules") == "all-linear"
        ):
            fields = {**fields, "target_modules": ["q_proj", "o_proj"]}  # its experts are fused
        model = classifier(base, name)
        tuned[name] = save_random(model, tmp_path / name, slot, task_type="SEQ_CLS", **fields)
        driver.load(slot, tmp_path / name)
    rng = random.Random(5)
    prompts = {
        name: [[rng.randrange(300) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
        for name in FEATURES
    }
    scored = [
        (name, index, pooled(f"{name}-{index}", prompt, slot, Pooling.HEAD, rng.randrange(4)))
        for slot, name in enumerate(FEATURES, start=1)
        for index, prompt in enumerate(prompts[name])
    ]
    writing = [
        Job(greedy(f"g{slots}", list(range(9 + len(slots))), 12), slots)
        for slots in ((), ((0, 1.0),))
    ]
    again = [greedy(job.request.request_id, job.request.prompt_ids, 12) for job in writing]
    alone = driver.run(
        [Job(request, job.slots) for request, job in zip(again, writing, strict=True)]
    )
    assert driver.run([*writing, *[job for _, _, job in scored]], chunk=19)[:2] == alone
    assert alone[0] != alone[1]
    for name, model in tuned.items():
        expected = logits_of(model, prompts[name])
        for index, logits in enumerate(expected):
            [job] = [j for n, i, j in scored if (n, i) == (name, index)]
            found = job.samples[-1].pooled
            assert len(found) == NUM_LABELS[name]
            assert found == pytest.approx(logits, abs=MAX_ERROR), (name, index)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", [1000, 7])
def test_vectors_of_an_embedding_model_are_its_states_or_their_mean(base, tmp_path, chunk):
    runner = build_runner(base.folder, device="cpu", dtype="float32", arena_bytes=16 << 20)
    driver = Driver(runner)
    fields = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "FEATURE_EXTRACTION"}
    tuned = save_random(embedder(base), tmp_path / "adapter", 1, **fields)
    driver.load(2, tmp_path / "adapter")
    rng = random.Random(7)
    prompts = [[rng.randrange(300) for _ in range(count)] for count in (1, 16, 45)]
    for model, slot in ((tuned, 2), (embedder(base), None)):
        jobs = [
            (prompt, pooling, pooled(f"{len(prompt)}-{pooling}", prompt, slot, pooling, 0))
            for prompt in prompts
            for pooling in (Pooling.LAST, Pooling.MEAN)
        ]
        driver.run([job for _, _, job in jobs], chunk=chunk)
        for prompt, pooling, job in jobs:
            states = states_of(model, prompt)
            parts = [sample.pooled for sample in job.samples if sample.pooled]
            if pooling is Pooling.LAST:
                assert parts == [pytest.approx(states[-1].tolist(), abs=MAX_ERROR)]
                continue
            mean = [sum(values) / len(prompt) for values in zip(*parts, strict=True)]
            assert mean == pytest.approx(states.mean(dim=0).tolist(), abs=MAX_ERROR)


@pytest.mark.filterwarnings("ignore")
def test_a_plain_lora_with_a_head_is_packed_without_the_base(base, tmp_path):
    runner = build_runner(base.folder, device="cpu", dtype="float32", arena_bytes=4 << 20)
    for name, needs_base in (("plain", False), ("dora", True)):
        fields = {**FEATURES[name], "target_modules": ["v_proj"], "task_type": "SEQ_CLS"}
        save_random(classifier(base, name), tmp_path / name, 1, **fields)
        layout, geometry = runner.layout, runner.model_info().geometry
        packer = Packer(ModuleReader(geometry, layout.sites, layout.max_rank), layout)
        if needs_base:
            with pytest.raises(NeedsBase):
                packer.pack(tmp_path / name)
        else:
            assert packer.pack(tmp_path / name).index.facts.task == "SEQ_CLS"
