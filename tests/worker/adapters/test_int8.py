"""Adapters kept as integers: what is served is exactly the rounded adapter, on every path."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_services.worker.adapters.pack.values import Values
from loraplex_services.worker.runner.building import build_runner
from tests.worker.loading import adapter_blocks
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, prompt_logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, an adapter, and what is left of the adapter after rounding, in float32."""
    root = tmp_path_factory.mktemp("int8")
    base = make_base("llama", root / "base")
    for name in ("published", "rounded"):
        make_adapter(base, "rank-64-all-linear", root / name)
    path = root / "rounded" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: rounded(name, tensor) for name, tensor in tensors.items()}, path)
    return base.folder, root / "published", root / "rounded"


def rounded(name, tensor):
    """By rank row, which are columns of a published B."""
    rows = tensor.T if "lora_B" in name else tensor
    integers, factors = Values(rows.numpy(), "F32").to_int8()
    found = torch.from_numpy(integers.data * factors[:, None])
    return (found.T if "lora_B" in name else found).contiguous()


def driver_of(base, folder, **settings):
    driver = Driver(
        build_runner(base, device="cpu", dtype="float32", arena_bytes=8 << 20, **settings)
    )
    driver.load(0, folder)
    return driver


@pytest.mark.parametrize("cpu_isa", ["auto", "torch"])
def test_what_is_served_is_the_rounded_adapter_in_a_quarter_of_float32s_bytes(folders, cpu_isa):
    base, published, left_after_rounding = folders
    integers = driver_of(base, published, cpu_isa=cpu_isa, lora_dtype="int8")
    floats = driver_of(base, left_after_rounding, cpu_isa=cpu_isa)
    torch.testing.assert_close(
        prompt_logprobs(integers), prompt_logprobs(floats), rtol=1e-4, atol=1e-4
    )
    table = integers.runner._adapters.table.values()
    assert {tile.data.dtype for d in table for tile in (*d.a, *d.b)} == {torch.int8}
    blocks = [adapter_blocks(driver.runner, published) for driver in (integers, floats)]
    assert blocks[0] < 0.35 * blocks[1]


def test_rows_are_off_by_half_a_factor_at_the_most():
    rows = np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
    rows[2] = 0
    integers, factors = Values(rows, "F32").to_int8()
    assert np.abs(integers.data).max(axis=1).tolist() == [127, 127, 0, 127, 127]
    error = np.abs(integers.data * factors[:, None] - rows)
    assert (error <= 0.5001 * factors[:, None]).all()
