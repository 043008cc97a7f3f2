"""Compiled kernels compute the same bits for a request whatever else is in its steps."""

import random

import pytest
import torch

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.runner.backends import choose_operators
from tests.worker.parity.adapters import RESIZED, make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner

FEATURES = (
    "rank-8-all-linear",
    "dora",
    "lm-head",
    "embedding",
    "saved-norms",
    "saved-linears",
    "saved-tables",
    "token-rows",
    "dora-tables",
    "added-tokens-lora",
)
COMBINED = (("rank-8-all-linear", "lm-head"), ("lm-head", "rank-8-all-linear"))
"""Requests with both; the order of a sum decides its bits."""
NUM_TOKENS = 8

pytestmark = pytest.mark.skipif(
    not isinstance(choose_operators(torch.device("cpu"), torch.float32, "auto"), NativeOperators),
    reason="no compiled kernels",
)


def job_for(name, slots, rng):
    prompt = [rng.randrange(min(300, RESIZED.get(name, 300))) for _ in range(rng.randrange(2, 40))]
    names = name if isinstance(name, tuple) else () if name is None else (name,)
    adapters = tuple((slots[part], 0.7 if len(names) > 1 else 1.0) for part in names)
    request = greedy(f"{name}", prompt, NUM_TOKENS, logprobs=2, prompt_logprobs=1)
    return Job(request, adapters, arrival_step=rng.randrange(4))


def said(job):
    """Tokens and logprobs of a job, whatever the steps were."""
    return (
        job.request.output_ids,
        [sample.logprobs for sample in job.samples if sample.logprobs],
        [entry for sample in job.samples for entry in sample.prompt_logprobs.scored()],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base_name", ["llama", "gemma3"])
def test_a_request_has_the_same_bits_alone_and_beside_adapters_of_all_kinds(
    base_name, dtype, tmp_path
):
    base = make_base(base_name, tmp_path / "base")
    driver = Driver(parity_runner(base.folder, arena_bytes=64 << 20, dtype=dtype))
    names = (None, *FEATURES, *COMBINED)
    slots = {name: slot for slot, name in enumerate(FEATURES, 1)}
    for name, slot in slots.items():
        driver.load(slot, make_adapter(base, name, tmp_path / name))
    together = [job_for(name, slots, random.Random(str(name))) for name in names]
    driver.run(together, chunk=7)
    for name, job in zip(names, together, strict=True):
        alone = job_for(name, slots, random.Random(str(name)))
        driver.run([alone])
        assert said(job) == said(alone), name
