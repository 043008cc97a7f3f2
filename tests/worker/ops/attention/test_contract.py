"""The contract of attention backends, over those that compute on a CPU."""

from __future__ import annotations

import pytest
import torch

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.torch import VanillaAttention
from tests.worker.native.isas import ISAS, native
from tests.worker.ops.attention import contract

CASES = contract.cases()


@pytest.fixture(params=["vanilla", *ISAS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def made(name: str, dtype: torch.dtype = torch.float32, kept: str = "auto") -> AttentionMaker:
    maker = AttentionMaker(VanillaAttention)
    if name != "vanilla":
        maker = NativeOperators(native(name), dtype).attention_maker
    maker.kv_cache_dtype = kept
    return maker


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_case_equals_the_reference(name: str, dtype: torch.dtype, kept: str) -> None:
    maker = made(name, dtype, kept)
    for case in CASES if kept == "auto" else CASES[::12]:
        contract.check_case(maker, case, dtype)


def test_what_it_cannot_do_is_refused(name: str) -> None:
    contract.check_refusals(made(name))


def test_profiling_leaves_the_cache_alone(name: str) -> None:
    contract.check_profiling(made(name))


def test_metadata_says_what_the_page_says(name: str) -> None:
    contract.check_fields(made(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_codes_and_scales_are_those_of_torch(name: str, dtype: torch.dtype, kept: str) -> None:
    contract.check_codes(made(name, dtype, kept), dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_what_is_not_finite_is_not_finite_in_a_cache_of_codes_either(
    name: str, kept: str, value: float
) -> None:
    bench = contract.Bench(made(name, kept=kept), (4, 2))
    q, k, v = bench.random(3)
    v[1, 0, 5] = value
    metadata = bench.metadata([3], [0], [[4]])
    out = bench.layer.forward(q.flatten(1), k.flatten(1), v.flatten(1), metadata).view(3, 4, -1)
    assert not out[1:, :2].isfinite().any()
    assert out[:, 2:].isfinite().all()
