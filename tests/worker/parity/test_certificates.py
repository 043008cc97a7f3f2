"""What a certificate finds of a quantised base: the right one passes, a damaged one never does."""

import json
import random
import shutil
from contextlib import ExitStack

import pytest
from safetensors.torch import load_file, save_file

from loraplex.client.divergence import NUM_CANDIDATES, divergence
from tests.e2e.stack import BASE, DEMO, start
from tests.e2e.test_certificates import following
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.quantised import LAYOUTS, quantised_base
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
        return [
            entry for job in jobs for row in job.samples for entry in row.prompt_logprobs.scored()
        ]


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
@pytest.mark.timeout(400)
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


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_base_whose_scales_are_off_by_one_block_is_caught_when_a_version_is_published(tmp_path):
    write_quantised(tmp_path / "good", shift=0)
    write_quantised(tmp_path / "bad", shift=1)
    plain = ("--attention-backend", "vanilla", "--dtype", "float32")
    with ExitStack() as stacks:

        def started(name, model, *flags):
            stack = start(tmp_path / name, *flags, model=tmp_path / model)
            stacks.callback(stack.stop)
            return stack

        reference = started("reference", "good", *plain)
        reference.publish(DEMO / "adapters" / "upper")
        for name in ("good", "bad"):
            stack = started(f"served-{name}", name, "--dtype", "float32")
            stack.run_registry("tenants", "set", "default", "--max-kl", "0.0001")
            with following(stack, reference.grpc, "--max-kl", "1e-4", "--tag", "latest") as lines:
                stack.publish(DEMO / "adapters" / "upper", latest=False)
                line = next(lines)
            tagged = stack.run_registry("tag", "upper:v1", "latest", check=False)
            if name == "good":
                assert (line["error"], tagged.returncode) == (None, 0)
                assert stack.complete("upper", "abc")
                continue
            assert line["error"].startswith("default/upper:v1: KL")
            assert "is above --max-kl 0.0001" in line["error"]
            assert tagged.returncode == 3
            assert "max_kl" in tagged.stderr


def write_quantised(folder, shift):
    """The demo base in four bits, each row's scales `shift` blocks too far to the right."""
    layout = LAYOUTS["ct-int4"]
    shutil.copytree(BASE, folder)
    config = json.loads((BASE / "config.json").read_bytes())
    config["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(BASE / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed, _ = layout.pack(tensor.float())
        packed["weight_scale"] = packed["weight_scale"].roll(shift, dims=1)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{end}": part.contiguous() for end, part in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
