"""Adapters with rotary embeddings of their own == a base whose config has them, under PEFT; and
bases with a LongRoPE that published bases of their family never have."""

import json
import random
from dataclasses import replace

import pytest
import transformers

from tests.worker.parity import suite
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.ropes import SCALINGS, RopeStage, judge, make_jobs, set_rope_stage
from tests.worker.parity.suite import MAX_LOGPROB_ERROR

NUM_NEW_TOKENS = 16
BASES = {
    "llama": sorted(SCALINGS),
    "gemma3": ["yarn"],
    "phi3-longrope": ["linear", "longrope"],
    "phi3-partial-rope": ["llama3", "yarn"],
    "qwen2-window": ["linear", "yarn-all-keys"],
    "llama3-rope-tied": ["theta", "yarn"],
}
LONG = {"phi3-partial-rope", "qwen2-window", "llama3-rope-tied"}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 40,
    "short_factor": [1 + 0.05 * i for i in range(8)],
    "long_factor": [1.2 + 0.9 * i for i in range(8)],
}


def params():
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BASES]


@pytest.fixture(scope="module", params=params())
def stage(request, tmp_path_factory) -> RopeStage:
    root = tmp_path_factory.mktemp(request.param)
    return set_rope_stage(make_base(request.param, root / "base"), BASES[request.param], root)


def check(stage: RopeStage, jobs: list[tuple[str, Job]], near_ties: Verdict) -> None:
    for name, verdict, logprob_error in judge(stage, jobs):
        near_ties.add(verdict)
        assert logprob_error < MAX_LOGPROB_ERROR, name


def test_rows_of_different_ropes_in_one_batch_equal_peft_token_for_token(stage, near_ties):
    jobs = make_jobs(stage, NUM_NEW_TOKENS, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19)
    check(stage, jobs, near_ties)


def test_a_batch_of_different_ropes_equals_each_request_alone(stage):
    outputs = stage.driver.run(
        [job for _, job in make_jobs(stage, NUM_NEW_TOKENS, stagger=True)], chunk=23
    )
    for (name, job), expected in zip(
        make_jobs(stage, NUM_NEW_TOKENS, stagger=False), outputs, strict=True
    ):
        assert stage.driver.run([job]) == [expected], name


def test_every_rope_changes_what_is_said(stage):
    rng = random.Random(1)
    prompt = [rng.randrange(300) for _ in range(64)]
    jobs = []
    for name in stage.scalings:
        for slot in (stage.slots[name], stage.slots[name] + 1):  # with and without its rope
            jobs.append(Job(greedy(str(slot), prompt, 1, prompt_logprobs=0), ((slot, 1.0),)))
    stage.driver.run(jobs)
    scores = [[e.logprob for s in job.samples for e in s.prompt_logprobs.scored()] for job in jobs]
    for name, own, twin in zip(stage.scalings, scores[::2], scores[1::2], strict=True):
        assert max(abs(a - b) for a, b in zip(own, twin, strict=True)) > 1e-3, name


def test_texts_beyond_the_context_of_the_base_equal_peft(stage, near_ties):
    if stage.base.name != "llama":
        pytest.skip("once is enough")
    names = [name for name in stage.scalings if name in ("linear", "theta", "yarn", "llama3")]
    jobs = [
        (n, j)
        for n, j in make_jobs(stage, NUM_NEW_TOKENS, stagger=True, lengths=(520, 560))
        if n in names
    ]
    stage.driver.run([job for _, job in jobs], chunk=200)
    assert all(job.request.num_tokens > 512 for _, job in jobs)
    check(stage, jobs, near_ties)


@pytest.mark.parametrize("names_context", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window", "mixtral", "qwen2-moe"])
def test_a_base_of_any_family_with_a_long_rope_equals_transformers(
    name, names_context, tmp_path, near_ties
):
    base = make_base(name, tmp_path / "base", rope_parameters=LONG_ROPE, head_dim=16)
    if not names_context:
        path = base.folder / "config.json"
        fields = json.loads(path.read_text())
        del fields["max_position_embeddings"]
        path.write_text(json.dumps(fields))
        config = transformers.AutoConfig.from_pretrained(base.folder)
        model = type(base.model).from_pretrained(
            base.folder, config=config, dtype="float32", attn_implementation="eager"
        )
        base = replace(base, model=model.eval().requires_grad_(False))
    stage = suite.stage_of(base, ["rank-4-attention", "rank-1"], tmp_path)
    jobs = suite.make_jobs(stage, 3, NUM_NEW_TOKENS, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19)
    lengths = [(len(job.request.prompt_ids), job.request.num_tokens) for _, job in jobs]
    assert any(prompt <= 40 < total for prompt, total in lengths), "one outgrows the short factors"
    for feature, verdict, logprob_error in suite.judge(stage, jobs):
        near_ties.add(verdict)
        assert logprob_error < MAX_LOGPROB_ERROR, feature
