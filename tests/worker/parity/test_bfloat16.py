"""bfloat16: our error against float32 is no larger than that of transformers' own bfloat16."""

import random
from dataclasses import replace

import pytest
import torch
import transformers

from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

NUM_PROMPTS, PROMPT_TOKENS = 24, 420
FEATURES = ["rank-8-all-linear", "rslora", "dora"]


DAILY = "llama"
BASES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi3-longrope", "mixtral",
    "qwen2-moe", "qwen3-moe", "llama-yarn-biases", "gemma4", "gemma4-moe",
]  # fmt: skip


def params():
    return [pytest.param(name, marks=[pytest.mark.long] * (name != DAILY)) for name in BASES]


@pytest.fixture(scope="module", params=params())
def base(request, tmp_path_factory):
    return make_base(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(base, name, root / name) for name in FEATURES}


def scored_prompts():
    rng = random.Random(8)
    names = [None, *FEATURES]
    return [
        (names[i % 4], [rng.randrange(300) for _ in range(PROMPT_TOKENS)])
        for i in range(NUM_PROMPTS)
    ]


def our_scores(base, folders) -> torch.Tensor:
    """Logprob of each prompt token but the first, `[prompts, tokens - 1]`."""
    runner = parity_runner(base.folder, dtype="bfloat16", arena_bytes=16 << 20)
    driver = Driver(runner)
    for slot, folder in enumerate(folders.values()):
        driver.load(slot, folder)
    jobs = []
    for i, (name, prompt) in enumerate(scored_prompts()):
        slots = () if name is None else ((FEATURES.index(name), 1.0),)
        jobs.append(Job(greedy(str(i), prompt, 1, prompt_logprobs=0), slots))
    driver.run(jobs, chunk=150)
    return torch.tensor(
        [
            [s.logprob for sample in job.samples for s in sample.prompt_logprobs.scored()]
            for job in jobs
        ]
    )


def reference_scores(reference) -> torch.Tensor:
    rows = []
    for name, prompt in scored_prompts():
        logprobs = reference.logits(name, prompt).float().log_softmax(-1)
        rows.append(logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.stack(rows)


def test_errors_are_at_most_those_of_transformers(base, folders):
    exact = reference_scores(Reference(base, folders))
    # As it is loaded in practice: weights in bfloat16, frequencies of the rope in float32.
    half = transformers.AutoModelForCausalLM.from_pretrained(
        base.folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    half = replace(base, model=half.requires_grad_(False))
    theirs = (reference_scores(Reference(half, folders)) - exact).abs().flatten()
    ours = (our_scores(base, folders) - exact).abs().flatten()
    assert len(ours) >= 10_000
    tails = ours.quantile(0.99) / theirs.quantile(0.99)
    print(f"{base.name}: mean {ours.mean() / theirs.mean():.2f}x, 99th percentile {tails:.2f}x")
    assert theirs.mean() > 1e-4
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.quantile(0.99) <= 1.25 * theirs.quantile(0.99)
