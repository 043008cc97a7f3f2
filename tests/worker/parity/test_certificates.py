"""What a certificate finds of a quantised base: the right one passes, a damaged one never does."""

import random

import pytest
from safetensors.torch import load_file, save_file

from loraplex.client.certifying import NUM_CANDIDATES, divergence
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.quantised import quantised_base
from tests.worker.parity.runners import parity_runner

ADAPTERS = ("rank-1", "rank-8-all-linear", "dora", "patterns", "lm-head")
MAX_KL = 1e-4
"""Between kernels that read codes and torch over what they mean, both in float32."""


class Side:
    """One worker, as certificates see it."""

    def __init__(self, folder, adapters, **settings):
        self._driver = Driver(parity_runner(folder, arena_bytes=16 << 20, **settings))
        self._slots = {name: slot for slot, name in enumerate(adapters)}
        for name, slot in self._slots.items():
            self._driver.load(slot, adapters[name])

    def scored(self, adapter, probes):
        """The distributions at each position of all probes."""
        jobs = [
            Job(
                greedy(f"{i}", prompt, 1, prompt_logprobs=NUM_CANDIDATES),
                ((self._slots[adapter], 1.0),),
            )
            for i, prompt in enumerate(probes)
        ]
        self._driver.run(jobs, chunk=19)
        return [entry for job in jobs for row in job.samples for entry in row.prompt_logprobs]


def probes_of(seed):
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(40)] for _ in range(4)]


def off_by_one_block(folder, seed, target):
    """Write a copy of the base in which a linear's groups have their neighbours' scales."""
    tensors = load_file(folder / "model.safetensors")
    name = random.Random(seed).choice([n for n in tensors if n.endswith("weight_scale")])
    tensors[name] = tensors[name].roll(1, dims=1).contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").symlink_to(folder / "config.json")
    return name


@pytest.mark.long
def test_a_scale_off_by_one_block_is_caught_in_100_of_100_and_a_good_one_passes(tmp_path):
    base = quantised_base(make_base("llama", tmp_path / "plain"), "ct-int4", tmp_path / "base")
    adapters = {name: make_adapter(base, name, tmp_path / name) for name in ADAPTERS}
    reference = Side(base.folder, adapters, attention_backend="vanilla")
    good = Side(base.folder, adapters)
    caught = passed = 0
    for trial in range(100):
        adapter, probes = ADAPTERS[trial % len(ADAPTERS)], probes_of(trial)
        name = off_by_one_block(base.folder, trial, tmp_path / f"{trial}")
        bad = Side(tmp_path / f"{trial}", {adapter: adapters[adapter]})
        expected = reference.scored(adapter, probes)
        kl = divergence(expected, bad.scored(adapter, probes)).mean_kl
        assert kl > MAX_KL, (trial, name, kl)
        caught += 1
        kl = divergence(expected, good.scored(adapter, probes)).mean_kl
        assert kl < MAX_KL / 100, (trial, kl)
        passed += 1
    assert (caught, passed) == (100, 100)
