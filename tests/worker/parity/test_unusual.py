"""Odd geometries and random combinations of features in one batch == transformers + peft."""

import random
from functools import partial

import pytest
import torch

from services.worker.runner import build_runner
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.suite import MAX_LOGPROB_ERROR
from tests.worker.parity.unusual import unusual_adapter, unusual_base

NUM_ADAPTERS = 5
NUM_NEW_TOKENS = 16
DAILY = (3, 8)
SEEDS = 40


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


def error_of(found, logits, num_prompt):
    """Largest difference from a reference's logits `[tokens, V]`."""
    rows = logits.log_softmax(-1)[num_prompt - 1 : -1]
    pairs = zip(found, rows, strict=True)
    return max(abs(entry.logprob - row[entry.token_id].item()) for entry, row in pairs)


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("seed", params())
def test_unusual_bases_and_adapters_equal_peft_token_for_token(seed, path, tmp_path):
    base = unusual_base(seed, tmp_path / "base")
    names = [str(place) for place in range(NUM_ADAPTERS)]
    adapters = {n: unusual_adapter(base, 100 * seed + int(n), tmp_path / n) for n in names}
    settings = {"device": "cpu", "dtype": "float32", "arena_bytes": 32 << 20, "cpu_isa": path}
    driver = Driver(build_runner(base.folder, **settings))
    slots = {name: 3 * int(name) + 1 for name in names}
    for name, slot in slots.items():
        driver.load(slot, adapters[name])
    rng = random.Random(seed)
    jobs = make_jobs(rng, adapters, slots, base.model.config.vocab_size)
    driver.run([job for _, job in jobs], chunk=rng.choice((7, 19, 64)))
    reference, total = Reference(base, adapters), Verdict()
    with torch.inference_mode():
        for name, job in jobs:
            prompt, ours = job.request.prompt_ids, job.request.output_ids
            tokens = prompt + ours
            logits = reference.logits(name, tokens, len(prompt))
            again = partial(reference.logits64, name, tokens, len(prompt))
            total.judge(len(prompt), ours, logits, again, f"{base.name} {name}")
            found = [s.logprobs for s in job.samples if s.logprobs is not None]
            if error_of(found, logits, len(prompt)) > MAX_LOGPROB_ERROR:
                # Some random models amplify rounding: then float32 itself is no reference.
                assert error_of(found, again(), len(prompt)) < MAX_LOGPROB_ERROR, name
    total.finish()
