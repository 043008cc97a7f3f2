"""Adapters published in half precision: the compiled kernels read them as they are."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_services.worker.runner.building import build_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base("llama", tmp_path_factory.mktemp("base"))


def published_as(base, dtype, folder):
    make_adapter(base, "rank-64-all-linear", folder)
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    return folder


def driver_of(base, folder, cpu_isa):
    driver = Driver(
        build_runner(
            base.folder, device="cpu", dtype="float32", arena_bytes=8 << 20, cpu_isa=cpu_isa
        )
    )
    driver.load(0, folder)
    return driver


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_paths_serve_the_same_tokens_from_half_precision_files(base, dtype, tmp_path):
    folder = published_as(base, dtype, tmp_path / "half")
    drivers = [driver_of(base, folder, isa) for isa in ("auto", "torch")]
    if drivers[0].runner.model_info() == drivers[1].runner.model_info():
        pytest.skip("no compiled kernels here")
    tiles = [next(iter(d.runner._adapters.weights.table.values())).a[0].data for d in drivers]
    assert [tile.dtype for tile in tiles] == [dtype, torch.float32]
    compiled, portable = (d.runner.adapter_blocks(folder) for d in drivers)
    assert compiled < 0.6 * portable
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(20)] for _ in range(4)]
    outputs = [
        d.run([Job(greedy(str(i), p, 8), ((0, 1.0),)) for i, p in enumerate(prompts)])
        for d in drivers
    ]
    assert outputs[0] == outputs[1]
