"""Adapters published in half precision: the compiled kernels read them as they are."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.errors import InvalidRequest
from loraplex_services.worker.runner.building import build_runner
from tests.worker.loading import adapter_blocks
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy, prompt_logprobs


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
    tiles = [next(iter(d.runner._adapters.table.values())).a[0].data for d in drivers]
    assert [tile.dtype for tile in tiles] == [dtype, torch.float32]
    compiled, portable = (adapter_blocks(d.runner, folder) for d in drivers)
    assert compiled < 0.6 * portable
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(20)] for _ in range(4)]
    outputs = [
        d.run([Job(greedy(str(i), p, 8), ((0, 1.0),)) for i, p in enumerate(prompts)])
        for d in drivers
    ]
    assert outputs[0] == outputs[1]


TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@pytest.mark.parametrize("cpu_isa", ["auto", "torch"])
@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chosen_dtype_is_that_of_every_matrix(base, tmp_path, cpu_isa, lora_dtype, dtype):
    """What is served is the adapter rounded to it, whatever it was published in."""
    stored = TORCH[NAMES[lora_dtype]]
    published = published_as(base, torch.float32, tmp_path / "published")
    rounded = published_as(base, torch.float32, tmp_path / "rounded")
    path = rounded / "adapter_model.safetensors"
    tensors = {name: t.to(stored).float() for name, t in load_file(path).items()}
    save_file(tensors, path)
    settings = {"device": "cpu", "dtype": dtype, "arena_bytes": 8 << 20, "cpu_isa": cpu_isa}
    found = []
    for folder, kept in ((published, lora_dtype), (rounded, "float32")):
        driver = Driver(build_runner(base.folder, lora_dtype=kept, **settings))
        driver.load(0, folder)
        table = driver.runner._adapters.table.values()
        expected = TORCH[NAMES[kept]]
        assert {tile.data.dtype for d in table for tile in (*d.a, *d.b)} == {expected}
        found.append((prompt_logprobs(driver), adapter_blocks(driver.runner, folder)))
    tolerance = 1e-3 if dtype == "float32" else 0.1  # bfloat16 rounds sums of another order
    torch.testing.assert_close(found[0][0], found[1][0], rtol=tolerance, atol=tolerance)
    if stored is not torch.float32:
        assert found[0][1] < 0.6 * found[1][1]


def test_a_dtype_that_is_none_is_refused_by_name(base):
    with pytest.raises(InvalidRequest, match="lora_dtype: must be one of auto, float32"):
        build_runner(
            base.folder, device="cpu", dtype="float32", arena_bytes=8 << 20, lora_dtype="fp4"
        )
