"""Programs of steps: the bits of the layers in Python, for each base that has them."""

import random
from collections import Counter

import pytest
import torch

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.program import Program
from loraplex_services.worker.runner.backends import choose_operators
from tests.worker.parity.adapters import EXPERT_FEATURES, features_of, make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import random_prompt

DENSE = ("llama", "phi3-longrope", "qwen2-window", "qwen3", "gemma2", "gemma3")
SPARSE = ("mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss")
RECURRENT = ("qwen3.5-moe", "qwen3-next")
UNUSUAL = ("gemma4", "gemma4-all", "ministral3")
FEATURES = ("rank-8-all-linear", "rank-33-odd", "dora", "lora-bias", "bias-all", "patterns")
NUM_TOKENS = 12
DTYPES = ("float32", "bfloat16")

pytestmark = pytest.mark.skipif(
    not isinstance(choose_operators(torch.device("cpu"), torch.float32, "auto"), NativeOperators),
    reason="no compiled kernels",
)


class Compared:
    """Computes the layers in Python, too, and compares."""

    def __init__(self, model):
        self._compute, self._programmed = model.forward_layers, model.pass_layers
        self.programs = model.pass_layers.__self__
        self.sizes = Counter()
        model.pass_layers = self.forward

    def forward(self, x, rotations, batch):
        if batch.states is None:
            expected = self._compute(x.clone(), rotations, batch)
            result = self._programmed(x, rotations, batch)
        else:
            words = batch.states.cells.view(torch.int32)  # NaN where nothing is
            before = words.clone()
            expected = self._compute(x.clone(), rotations, batch)
            after = words.clone()
            words.copy_(before)
            result = self._programmed(x, rotations, batch)
            assert words.equal(after)
        read = slice(None) if batch.read_rows is None else batch.read_rows
        assert result[read].equal(expected[read])
        self.sizes[len(x)] += 1
        return result


@pytest.fixture
def num_runs(monkeypatch):
    """Counts the runs of programs by their numbers of rows."""
    runs = Counter()
    run = Program.run

    def counted(program, num_rows):
        runs[num_rows] += 1
        return run(program, num_rows)

    monkeypatch.setattr(Program, "run", counted)
    return runs


def drive(runner, base, tmp_path, features=FEATURES):
    driver = Driver(runner)
    slots = {}
    for slot, name in enumerate(features, 1):
        driver.load(slot, make_adapter(base, name, tmp_path / name))
        slots[name] = slot
    rng = random.Random(5)
    for names in ([None] * 3, [*slots, None, "dora", None], [None, "patterns"]):
        jobs = []
        for i, name in enumerate(names):
            adapters = () if name is None else ((slots[name], rng.choice((1.0, 0.5))),)
            request = greedy(f"{i}-{name}", random_prompt(rng), NUM_TOKENS + i)
            jobs.append(Job(request, adapters, arrival_step=rng.randrange(6)))
        driver.run(jobs, chunk=23)


def assert_all_run(compared, num_runs):
    assert None not in compared.programs._programs.values()
    assert num_runs == compared.sizes


def _bases_and_dtypes():
    """Each base in one dtype, and in the other one with the long tests: operators of both are in
    every kind of base."""
    for kind in (DENSE, SPARSE, RECURRENT, UNUSUAL):
        for index, name in enumerate(kind):
            for dtype in (DTYPES[index % 2], DTYPES[1 - index % 2]):
                marks = [pytest.mark.long] * (dtype != DTYPES[index % 2])
                yield pytest.param(name, dtype, marks=marks)


@pytest.mark.parametrize(("base_name", "dtype"), list(_bases_and_dtypes()))
def test_a_program_gives_the_bits_of_the_layers_in_python(base_name, dtype, tmp_path, num_runs):
    base = make_base(base_name, tmp_path / "base")
    runner = parity_runner(base.folder, arena_bytes=24 << 20, dtype=dtype)
    compared = Compared(runner._model)
    applying = features_of(base)
    features = [name for name in (*FEATURES, *EXPERT_FEATURES) if name in applying]
    drive(runner, base, tmp_path, features)
    assert_all_run(compared, num_runs)


@pytest.mark.parametrize(
    ("base_name", "setting", "value"),
    [
        ("qwen3", "quantization", "int8"),
        ("qwen3", "quantization", "int4"),
        ("mixtral", "quantization", "int8"),
        ("qwen3", "kv_cache_dtype", "int8"),
        ("qwen3", "kv_cache_dtype", "fp8"),
    ],
)
def test_programs_read_weights_and_keys_in_codes(base_name, setting, value, tmp_path, num_runs):
    base = make_base(base_name, tmp_path / "base")
    runner = parity_runner(base.folder, arena_bytes=64 << 20, dtype="bfloat16", **{setting: value})
    compared = Compared(runner._model)
    drive(runner, base, tmp_path, [name for name in FEATURES if name in features_of(base)])
    assert_all_run(compared, num_runs)


def test_adapters_that_replace_weights_stay_in_python(tmp_path, num_runs):
    replacing = ["saved-norms", "saved-linears", "token-rows"]
    base = make_base("llama", tmp_path / "base")
    driver = Driver(runner := parity_runner(base.folder, arena_bytes=64 << 20))
    Compared(runner._model)
    for slot, name in enumerate(replacing, 1):
        driver.load(slot, make_adapter(base, name, tmp_path / name))
        job = Job(greedy(name, [5, 6, 7, 200], NUM_TOKENS), ((slot, 1.0),))
        driver.run([job])
    assert not num_runs


def test_several_adapters_of_one_request_give_the_same_bits(tmp_path, num_runs):
    base = make_base("llama", tmp_path / "base")
    driver = Driver(runner := parity_runner(base.folder, arena_bytes=64 << 20))
    Compared(runner._model)
    for slot, name in enumerate(FEATURES, 1):
        driver.load(slot, make_adapter(base, name, tmp_path / name))
    both = ((1, 0.5), (2, 0.25))
    jobs = [
        Job(greedy(f"{i}", [5, 6, 7 + i], 6), slots) for i, slots in enumerate((both, (), both))
    ]
    driver.run(jobs)  # three rows have two runs of each adapter, which programs cannot hold
    driver.run([Job(greedy("a", [8, 9], 6), both), Job(greedy("b", [9], 6), both)])
    assert num_runs
