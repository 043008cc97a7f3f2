"""Experts in compiled kernels compared with those computed one after another in torch."""

import pytest
import torch

from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import Expert, LoopedExperts
from loraplex_services.worker.layers.native_experts import (
    NativeExperts,
    NativeGate,
    choose_experts,
)
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.ops.activation.torch import plain_gate
from loraplex_services.worker.ops.lora.torch import add_lora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe import torch as portable
from loraplex_services.worker.types.model_config import ClampedSwiglu
from tests.worker.native.code_weights import weight_in_codes
from tests.worker.native.isas import ISAS, native_choosing

NUM_EXPERTS, NUM_ACTIVE, HIDDEN, WIDTH = 6, 2, 40, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture(params=ISAS)
def native(request):
    with native_choosing(request.param) as library:
        yield library


def experts_of(native, dtype, has_biases=False, kind=None):
    """`kind`: of the codes of their weights; None = they are plain."""
    operators = NativeOperators(native, dtype)
    torch.manual_seed(0)
    sites = iter(range(2 * NUM_EXPERTS))

    def linear(num_outputs, num_inputs):
        site = next(sites)
        if kind is not None:
            codes = weight_in_codes((num_outputs, num_inputs), kind, num_inputs, seed=site)
            return LoraLinear(site, operators.coded_linear(codes, dtype), None, add_lora)
        weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).bfloat16().to(dtype)
        bias = torch.randn(num_outputs).to(dtype) if has_biases else None
        return LoraLinear(site, operators.expert_linear(weight), bias, add_lora)

    return [Expert(linear(2 * WIDTH, HIDDEN), linear(HIDDEN, WIDTH)) for _ in range(NUM_EXPERTS)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", ClampedSwiglu(1.702, 0.9)])
def test_experts_equal_those_computed_one_after_another(native, dtype, activation):
    experts = experts_of(native, dtype, has_biases=isinstance(activation, ClampedSwiglu))
    compare_with_looped(native, experts, activation, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_experts_may_have_weights_in_codes(native, dtype, kind):
    compare_with_looped(native, experts_of(native, dtype, kind=kind), "silu", dtype)


def compare_with_looped(native, experts, activation, dtype):
    ours, lora = NativeExperts(native, experts, NativeGate.of(activation)), LoraBatch((), {})
    looped = LoopedExperts(experts, plain_gate(activation))
    for num_rows in (1, 3, 37):
        x = torch.randn(num_rows, HIDDEN).to(dtype)
        chosen, weights = choose_experts(
            native, torch.randn(num_rows, NUM_EXPERTS).to(dtype), NUM_ACTIVE, renormalise=True
        )
        y = ours.forward(x, chosen, weights, lora)
        expected = looped.forward(x, chosen, weights, lora)
        limit = TOLERANCE[dtype] * max(1.0, float(expected.std()))
        torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=limit)
        for row in range(num_rows):
            alone = slice(row, row + 1)
            own = ours.forward(x[alone], chosen[alone], weights[alone], lora)
            assert own.equal(y[alone])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", ClampedSwiglu(1.702, 0.9)])
def test_experts_of_nan_are_nan(native, activation):
    experts = NativeExperts(native, experts_of(native, torch.float32), NativeGate.of(activation))
    x, chosen = torch.randn(3, HIDDEN), torch.tensor([[0, 1]] * 3)
    x[1] = torch.nan
    y = experts.forward(x, chosen, torch.full((3, 2), 0.5), LoraBatch((), {}))
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_chosen_experts_are_those_of_torch(native, renormalise):
    scores = 4 * torch.randn(50, 130)
    chosen, weights = choose_experts(native, scores, 8, renormalise)
    expected, expected_weights = portable.choose_experts(scores, 8, renormalise)
    assert chosen.equal(expected)
    torch.testing.assert_close(weights, expected_weights)
    factors = torch.rand(130)
    scaled = choose_experts(native, scores, 8, renormalise, factors)[1]
    assert scaled.equal(weights * factors[chosen])


def test_equal_and_undefined_scores_choose_different_experts(native):
    scores = torch.zeros(3, 5)
    scores[1, 3] = torch.nan
    scores[2] = torch.nan
    chosen, weights = choose_experts(native, scores, 3, renormalise=True)
    assert chosen[0].tolist() == [0, 1, 2]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert weights[1:].isnan().all()
