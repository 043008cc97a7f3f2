"""The compiled and the torch path score the same prompts alike, adapters of all kinds mixed."""

import random

import pytest

from loraplex_services.worker.runner.building import build_runner
from tests.worker.native.isas import ISAS, native
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy

FEATURES = ["rank-4-attention", "rank-8-all-linear", "dora", "saved-norms", "rslora"]


def scores_of(base, folders, cpu_isa):
    """Logprobs of each prompt's tokens, computed in chunks in one mixed batch."""
    driver = Driver(
        build_runner(
            base.folder, device="cpu", dtype="float32", arena_bytes=8 << 20, cpu_isa=cpu_isa
        )
    )
    for slot, folder in enumerate(folders):
        driver.load(slot, folder)
    rng = random.Random(7)
    jobs = []
    for i in range(12):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(2, 50))]
        slots = ((i % (len(folders) + 1), 1.0),) if i % (len(folders) + 1) < len(folders) else ()
        request = greedy(str(i), prompt, 1, prompt_logprobs=1)
        jobs.append(Job(request, slots, arrival_step=rng.randrange(4)))
    driver.run(jobs, chunk=13)
    return [
        [score.logprob for sample in job.samples for score in sample.prompt_logprobs.scored()]
        for job in jobs
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama", "llama-yarn-biases", "gemma2", "qwen3", "gpt-oss"])
def test_both_paths_score_prompts_alike(isa, name, tmp_path):
    native(isa)
    base = make_base(name, tmp_path / "base")
    folders = [make_adapter(base, feature, tmp_path / feature) for feature in FEATURES]
    compiled, portable = (scores_of(base, folders, path) for path in (isa, "torch"))
    for ours, expected in zip(compiled, portable, strict=True):
        assert ours == pytest.approx(expected, abs=1e-4)
