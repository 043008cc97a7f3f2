"""Adapters with rotary embeddings of their own == a base whose config has them, under PEFT."""

import copy
import json
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from loraplex.adapter_format.rope_scaling import read
from services.worker.model.own_rope import own_ropes, switch_len_of
from services.worker.request import OwnRope
from services.worker.runner import build_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.suite import MAX_LOGPROB_ERROR

NUM_NEW_TOKENS = 16
LLAMA3 = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
SCALINGS = {
    "linear": {"type": "linear", "factor": 4},
    "theta": {"rope_type": "default", "rope_theta": 500000, "max_position_embeddings": 1024},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3-of-base": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64},
    "yarn-all-keys": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
        "rope_theta": 77000, "beta_fast": 16, "beta_slow": 2, "truncate": False,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 40, "factor": 3,
        "short_factor": [1 + 0.05 * i for i in range(8)],
        "long_factor": [1.2 + 0.9 * i for i in range(8)],
    },
}  # fmt: skip
ADAPTERS = ["rank-4-attention", "rank-8-all-linear", "dora"]
BASES = {
    "llama": sorted(SCALINGS),
    "gemma3": ["yarn"],
    "phi3-longrope": ["linear", "longrope"],
    "phi3-partial-rope": ["llama3", "yarn"],
    "qwen2-window": ["linear", "yarn-all-keys"],
    "llama3-rope-tied": ["theta", "yarn"],
}
LONG = {"phi3-partial-rope", "qwen2-window", "llama3-rope-tied"}


@dataclass(frozen=True)
class Stage:
    base: TinyBase
    driver: Driver
    scalings: list[str]
    slots: dict[str, int]
    references: dict[str, Reference]


def rescaled(base: TinyBase, scaling: dict[str, object]) -> TinyBase:
    """The base as transformers runs it with another config."""
    config = copy.deepcopy(base.model.config)
    context = read(scaling).context_tokens(config.max_position_embeddings)
    own = {key: value for key, value in scaling.items() if key not in ("type",)}
    own = {"rope_type": scaling.get("type"), **own}
    own.pop("max_position_embeddings", None)
    parameters = config.rope_parameters
    nested = "full_attention" in parameters
    old = parameters["full_attention"] if nested else parameters
    kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    own.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if own["rope_type"] in ("linear", "default"):
        del own["original_max_position_embeddings"]
    if "original_max_position_embeddings" in own:  # the config's goes before that of the rope
        config.original_max_position_embeddings = own["original_max_position_embeddings"]
    own = {**kept, **own}
    config.rope_parameters = {**parameters, "full_attention": own} if nested else own
    config.max_position_embeddings = context
    model = type(base.model)(config).eval()
    model.load_state_dict(base.model.state_dict())
    model.tie_weights()
    return replace(base, model=model.requires_grad_(False))


def params():
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BASES]


@pytest.fixture(scope="module", params=params())
def stage(request, tmp_path_factory) -> Stage:
    root: Path = tmp_path_factory.mktemp(request.param)
    base = make_base(request.param, root / "base")
    driver = Driver(build_runner(base.folder, device="cpu", dtype="float32", arena_bytes=64 << 20))
    slots: dict[str, int] = {}
    references: dict[str, Reference] = {}
    features = ["rank-4-attention"] if base.name.startswith("phi3") else ADAPTERS
    for place, name in enumerate([*BASES[request.param], "plain"]):
        feature = features[place % len(features)]
        folder = make_adapter(base, feature, root / name, seed=place)
        own_base = base
        if name != "plain":
            driver.load(2 * place + 2, folder)
            path = folder / "adapter_config.json"
            fields = json.loads(path.read_text()) | {"rope_scaling": SCALINGS[name]}
            path.write_text(json.dumps(fields))
            own_base = rescaled(base, SCALINGS[name])
        references[name] = Reference(own_base, {feature: folder})
        slots[name] = 2 * place + 1
        driver.load(slots[name], folder)
    return Stage(base, driver, BASES[request.param], slots, references)


def make_jobs(stage: Stage, *, stagger: bool, lengths=(30, 70)) -> list[tuple[str, Job]]:
    rng = random.Random(5)
    jobs = []
    names = [*stage.slots, *stage.scalings, "base", "base"]
    for place, name in enumerate(names):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(*lengths))]
        if name == "longrope":
            prompt = prompt[: 30 if place % 2 else 60]  # grows long, or is from the beginning
        request = greedy(f"{place}-{name}", prompt, NUM_NEW_TOKENS, logprobs=0)
        if name in stage.scalings:
            layers = own_ropes(stage.driver.runner.layout.ropes, read(SCALINGS[name]))
            request.rope = OwnRope(name, switch_len_of(layers))
        slots = () if name == "base" else ((stage.slots[name], 1.0),)
        arrival_step = rng.randrange(9)
        jobs.append((name, Job(request, slots, arrival_step if stagger else 0)))
    return jobs


@torch.inference_mode()
def judge(stage: Stage, jobs: list[tuple[str, Job]]) -> Verdict:
    total = Verdict()
    for name, job in jobs:
        prompt, ours = job.request.prompt_ids, job.request.output_ids
        reference = stage.references["plain" if name == "base" else name]
        (adapter,) = [key for key in reference.names if (key is None) == (name == "base")]
        tokens = prompt + ours
        logits = reference.logits(adapter, tokens, len(prompt))
        again = partial(reference.logits64, adapter, tokens, len(prompt))
        total.judge(len(prompt), ours, logits, again, job.request.request_id)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = [s.logprobs for s in job.samples if s.logprobs is not None]
        for entry, row in zip(found, expected, strict=True):
            assert abs(entry.logprob - row[entry.token_id].item()) < MAX_LOGPROB_ERROR, name
    return total


def test_rows_of_different_ropes_in_one_batch_equal_peft_token_for_token(stage):
    jobs = make_jobs(stage, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19)
    judge(stage, jobs).finish()


def test_a_batch_of_different_ropes_equals_each_request_alone(stage):
    outputs = stage.driver.run([job for _, job in make_jobs(stage, stagger=True)], chunk=23)
    for (name, job), expected in zip(make_jobs(stage, stagger=False), outputs, strict=True):
        assert stage.driver.run([job]) == [expected], name


def test_every_rope_changes_what_is_said(stage):
    rng = random.Random(1)
    prompt = [rng.randrange(300) for _ in range(64)]
    jobs = []
    for name in stage.scalings:
        for slot in (stage.slots[name], stage.slots[name] + 1):  # with and without its rope
            jobs.append(Job(greedy(str(slot), prompt, 1, prompt_logprobs=0), ((slot, 1.0),)))
    stage.driver.run(jobs)
    scores = [[e.logprob for s in job.samples for e in s.prompt_logprobs] for job in jobs]
    for name, own, twin in zip(stage.scalings, scores[::2], scores[1::2], strict=True):
        assert max(abs(a - b) for a, b in zip(own, twin, strict=True)) > 1e-3, name


def test_texts_beyond_the_context_of_the_base_equal_peft(stage):
    if stage.base.name != "llama":
        pytest.skip("once is enough")
    names = [name for name in stage.scalings if name in ("linear", "theta", "yarn", "llama3")]
    jobs = [(n, j) for n, j in make_jobs(stage, stagger=True, lengths=(520, 560)) if n in names]
    stage.driver.run([job for _, job in jobs], chunk=200)
    assert all(job.request.num_tokens > 512 for _, job in jobs)
    judge(stage, jobs).finish()
