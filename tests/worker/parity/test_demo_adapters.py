"""The trained demo adapters: batched == alone == merged == transformers + peft, plain identity."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.worker.parity.bases import TinyBase
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

DEMO = Path(__file__).parents[3] / "demo"
ADAPTERS = {folder.name: folder for folder in sorted((DEMO / "adapters").iterdir())}
NUM_NEW_TOKENS = 16


@pytest.fixture(scope="module")
def base() -> TinyBase:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO / "base", dtype=torch.float32, attn_implementation="eager"
    )
    return TinyBase("demo", DEMO / "base", model.eval())


@pytest.fixture(scope="module")
def reference(base) -> Reference:
    return Reference(base, ADAPTERS)


@pytest.fixture(scope="module")
def driver() -> Driver:
    driver = Driver(parity_runner(DEMO / "base", arena_bytes=48 << 20))
    for slot, folder in enumerate(ADAPTERS.values()):
        driver.load(slot, folder)
    return driver


def make_jobs() -> list[tuple[str | None, Job]]:
    rng = random.Random(5)
    vocabulary = 64
    jobs: list[tuple[str | None, Job]] = []
    for i in range(2):
        for slot, name in enumerate(ADAPTERS):
            prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(2, 30))]
            request = greedy(f"{name}-{i}", prompt, NUM_NEW_TOKENS)
            jobs.append((name, Job(request, ((slot, 1.0),), arrival_step=rng.randrange(8))))
    prompt = [rng.randrange(vocabulary) for _ in range(20)]
    jobs.append((None, Job(greedy("base", prompt, NUM_NEW_TOKENS))))
    return jobs


@torch.inference_mode()
def choices_after(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """What greedy decoding chooses at each place of `output`; if that is `output`, it is what
    decoding token by token gives."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_mixed_batch_equals_peft_and_merged_weights(driver, reference):
    jobs = make_jobs()
    outputs = driver.run([job for _, job in jobs], chunk=7)
    merged = {name: reference.merged(name) for name in ADAPTERS}
    for (name, job), output in zip(jobs, outputs, strict=True):
        prompt = job.request.prompt_ids
        assert choices_after(reference.model(name), prompt, output) == output, (name, "peft")
        if name is not None:
            assert choices_after(merged[name], prompt, output) == output, (name, "merged")


def test_mixed_batch_equals_each_adapter_alone(driver):
    together = driver.run([job for _, job in make_jobs()], chunk=7)
    for (name, job), expected in zip(make_jobs(), together, strict=True):
        job.arrival_step = 0
        assert driver.run([job]) == [expected], name
