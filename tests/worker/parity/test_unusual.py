"""Odd geometries and random combinations of features in one batch == transformers + peft."""

import copy
import random
from functools import partial

import pytest
import torch

from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import MAX_LOGPROB_ERROR
from tests.worker.parity.unusual import unusual_adapter, unusual_base

NUM_ADAPTERS = 5
NUM_NEW_TOKENS = 16
DAILY = (3, 8, 160, 161)
SEEDS = 200
MAX_NOISES = 3.0
NUM_NOISES = 4


def params():
    return [
        pytest.param(seed, marks=[pytest.mark.long] * (seed not in DAILY)) for seed in range(SEEDS)
    ]


def make_jobs(rng, adapters, slots, vocab_size):
    jobs = []
    for place, name in enumerate([*adapters, *adapters, None, None]):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 50))]
        request = greedy(f"{place}-{name}", prompt, NUM_NEW_TOKENS, logprobs=0)
        rows = ((slots[name], 1.0),) if name else ()
        jobs.append((name, Job(request, rows, rng.randrange(8))))
    return jobs


def logprobs_of(logits, tokens, num_prompt):
    """Of the tokens after the prompt, float64, by logits `[tokens, V]`."""
    rows = logits.double().log_softmax(-1)[num_prompt - 1 : -1]
    return rows.gather(1, torch.tensor(tokens[num_prompt:])[:, None])[:, 0]


def noise_of(reference, name, tokens, num_prompt, exact):
    """What rounding does to transformers + PEFT themselves in float32: the largest logprob error of
    the model with weights a rounding error away, over a few draws.

    Random weights make some models amplify: seed 47's queries and keys of +-50 give scores in the
    thousands, so each of its layers multiplies an error by 5 to 25, and PEFT in float32 is itself
    1.3e-3 from PEFT in float64. No float32 result can be nearer than such noise but by luck.
    """
    noises = []
    for draw in range(NUM_NOISES):
        generator = torch.Generator().manual_seed(draw)
        model = copy.deepcopy(reference.model(name))
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data.float() * (1 + 2**-23 * noise)
        logits = reference.logits_of(model, tokens, num_prompt)
        noises.append((logprobs_of(logits, tokens, num_prompt) - exact).abs().max().item())
    return max(noises)


@pytest.mark.parametrize("path", ["auto", "vanilla"])
@pytest.mark.parametrize("seed", params())
def test_unusual_bases_and_adapters_equal_peft_token_for_token(seed, path, tmp_path, near_ties):
    base = unusual_base(seed, tmp_path / "base")
    names = [str(place) for place in range(NUM_ADAPTERS)]
    adapters = {n: unusual_adapter(base, 100 * seed + int(n), tmp_path / n) for n in names}
    driver = Driver(parity_runner(base.folder, arena_bytes=32 << 20, attention_backend=path))
    slots = {name: 3 * int(name) + 1 for name in names}
    for name, slot in slots.items():
        driver.load(slot, adapters[name])
    rng = random.Random(seed)
    jobs = make_jobs(rng, adapters, slots, base.model.config.vocab_size)
    driver.run([job for _, job in jobs], chunk=rng.choice((7, 19, 64)))
    reference = Reference(base, adapters)
    with torch.inference_mode():
        for name, job in jobs:
            prompt, ours = job.request.prompt_ids, job.request.output_ids
            tokens = prompt + ours
            logits = reference.logits(name, tokens, len(prompt))
            again = partial(reference.logits64, name, tokens, len(prompt))
            near_ties.judge(len(prompt), ours, logits, again, f"{base.name} {name}")
            found = [s.logprobs.logprob for s in job.samples if s.logprobs is not None]
            found = torch.tensor(found, dtype=torch.float64)
            if (found - logprobs_of(logits, tokens, len(prompt))).abs().max() <= MAX_LOGPROB_ERROR:
                continue
            exact = logprobs_of(again(), tokens, len(prompt))
            error = (found - exact).abs().max().item()
            if error > MAX_LOGPROB_ERROR:
                noise = noise_of(reference, name, tokens, len(prompt), exact)
                print(f"{base.name} {name}: error {error:.1e}, noise of float32 {noise:.1e}")
                assert error <= MAX_NOISES * noise, name
