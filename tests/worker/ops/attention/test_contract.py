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


def made(name: str, dtype: torch.dtype = torch.float32) -> AttentionMaker:
    if name == "vanilla":
        return AttentionMaker(VanillaAttention)
    return NativeOperators(native(name), dtype).attention_maker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_case_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    maker = made(name, dtype)
    for case in CASES:
        contract.check_case(maker, case, dtype)


def test_what_it_cannot_do_is_refused(name: str) -> None:
    contract.check_refusals(made(name))


def test_profiling_leaves_the_cache_alone(name: str) -> None:
    contract.check_profiling(made(name))


def test_metadata_says_what_the_page_says(name: str) -> None:
    contract.check_fields(made(name))
