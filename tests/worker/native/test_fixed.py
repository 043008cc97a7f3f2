"""Products in fixed point: how far from exact they may be, and what they keep."""

import pytest
import torch

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.ops.linear.cpu import FixedLinear, PackedLinear
from tests.worker.native.isas import ISAS, native

MAX_INPUTS = 256  # of a block
ROWS = (1, 2, 5, 6, 7, 12, 13, 18, 25, 200, 400)


@pytest.fixture(params=ISAS)
def fixed(request):
    library = native(request.param)
    if not library.has_fixed:
        pytest.skip(f"{library.isa} has no products in fixed point")
    return library


def in_blocks(x):
    """The blocks of the inputs of `[T, in]`, as `gemm_fixed.cpp` divides them."""
    num_inputs = x.shape[1]
    mean = -(-num_inputs // -(-num_inputs // MAX_INPUTS))
    return x.split(-(-mean // 8) * 8, dim=1)


def largest_error(x, weight):
    """The most by which the product of a row and an output may differ from the exact one, float64
    `[T, out]`.

    A block of weights is rounded to steps of at most 1/4096 of its largest, and a block of inputs
    to steps of at most 2^-17 of the sum of their magnitudes, or 2^-14 of their largest.
    """
    bound = 0.0
    for inputs, weights in zip(in_blocks(x.double()), in_blocks(weight.double()), strict=True):
        sums, most = inputs.abs().sum(1), inputs.abs().amax(1)
        input_error = torch.maximum(sums * 1.001 / 2**17, most / 2**14) / 2
        weight_error = weights.abs().amax(1) / 4096 / 2
        bound = bound + input_error[:, None] * (weights.abs().sum(1) + weight_error * MAX_INPUTS)
        bound = bound + weight_error * sums[:, None]
    return bound * 1.0001  # sums of blocks are added in float32


def heavy_tailed(generator, *shape):
    """Values of which few are a hundred times as large as most."""
    normal = torch.randn(shape, generator=generator)
    return normal / torch.rand(shape, generator=generator).clamp(min=0.01)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 7), (33, 100), (16, 256), (70, 257), (200, 576), (70, 1000)], ids=str
)
def test_a_product_is_as_exact_as_its_digits(fixed, shape, stored):
    generator = torch.Generator().manual_seed(shape[1])
    weight = (heavy_tailed(generator, *shape) / shape[1] ** 0.5).to(stored)
    packed = fixed.pack_fixed(weight)
    for num_rows in ROWS:
        x = heavy_tailed(generator, num_rows, shape[1])
        beside = torch.full((num_rows, shape[1] + 3), float("nan"))[:, : shape[1]].copy_(x)
        y = fixed.linear_fixed(beside, packed, shape[0])
        error = (y.double() - x.double() @ weight.double().T).abs()
        assert (error <= largest_error(x, weight)).all(), (num_rows, error.max())
        half = x.bfloat16()
        rounded = fixed.linear_fixed(half.float(), packed, shape[0]).bfloat16()
        assert fixed.linear_fixed(half, packed, shape[0]).equal(rounded)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_digits_do_not_overflow(fixed, sign):
    for num_inputs in (1, 2, 8, 255, 256, 300, 512):
        x = torch.full((7, num_inputs), 1 - 2.0**-12)
        weight = torch.full((20, num_inputs), sign * (2 - 2.0**-7))
        y = fixed.linear_fixed(x, fixed.pack_fixed(weight.bfloat16()), 20)
        expected = x.double() @ weight.double().T
        assert ((y - expected).abs() <= largest_error(x, weight)).all(), num_inputs


def test_integers_are_multiplied_exactly(fixed):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 129, (50, 700), generator=generator).float()
    weight = torch.randint(-128, 129, (90, 700), generator=generator).bfloat16()
    product = fixed.linear_fixed(x, fixed.pack_fixed(weight), 90)
    assert product.double().equal(x.double() @ weight.double().T)


@pytest.mark.parametrize("num_inputs", [90, 700])
def test_a_row_does_not_depend_on_its_neighbours(fixed, num_inputs):
    torch.manual_seed(2)
    packed = fixed.pack_fixed(torch.randn(300, num_inputs).bfloat16())
    x = torch.randn(400, num_inputs).bfloat16()
    together = fixed.linear_fixed(x, packed, 300)
    for count in ROWS:
        for begin in (0, 400 - count):
            part = fixed.linear_fixed(x[begin : begin + count], packed, 300)
            assert part.equal(together[begin : begin + count])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_reach_their_row_or_output_alone(fixed, value):
    torch.manual_seed(3)
    x, weight = torch.randn(9, 600).bfloat16(), torch.randn(40, 600).bfloat16()
    expected = fixed.linear_fixed(x, fixed.pack_fixed(weight), 40)
    wrong_x, wrong_weight = x.clone(), weight.clone()
    wrong_x[4, 300] = wrong_weight[17, 5] = value
    y = fixed.linear_fixed(wrong_x, fixed.pack_fixed(weight), 40)
    assert y[4].isnan().all()
    expected_rows = torch.arange(9) != 4
    assert y[expected_rows].equal(expected[expected_rows])
    y = fixed.linear_fixed(x, fixed.pack_fixed(wrong_weight), 40)
    assert y[:, 17].isnan().all()
    expected_outputs = torch.arange(40) != 17
    assert y[:, expected_outputs].equal(expected[:, expected_outputs])


def test_zeros_and_the_smallest_values_stay(fixed):
    x = torch.zeros(3, 300)
    x[1], x[2, 7] = 1e-32, 3e38
    weight = torch.zeros(17, 300)
    weight[3], weight[4, 7] = 1.0, 0.5
    y = fixed.linear_fixed(x, fixed.pack_fixed(weight), 17)
    assert not y[0].any() and not y[:, 5:].any()
    torch.testing.assert_close(y[1, 3], torch.tensor(300 * 1e-32), atol=0, rtol=1e-3)
    torch.testing.assert_close(y[2, 3:5], torch.tensor([3e38, 1.5e38]), atol=0, rtol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (70, 37), (64, 600)], ids=str)
def test_rows_of_a_weight_come_back_rounded(fixed, shape):
    torch.manual_seed(4)
    weight = torch.randn(shape).bfloat16()
    packed, middle = fixed.pack_fixed(weight), shape[0] // 2
    for begin, end in [(0, shape[0]), (middle, shape[0]), (0, middle + 1), (middle, middle)]:
        found = fixed.unpack_fixed_rows(packed, shape[1], begin, end)
        rows = weight[begin:end].float()
        for values, expected in zip(in_blocks(found), in_blocks(rows), strict=True):
            most = expected.abs().amax(1, keepdim=True)
            assert ((values - expected).abs() <= most / 8192).all()
            is_exact = expected.abs() >= most / 32
            assert values[is_exact].equal(expected[is_exact])


def test_bfloat16_is_computed_in_fixed_point_and_float32_is_not(fixed):
    weight = torch.randn(70, 96).bfloat16()
    half, full = (NativeOperators(fixed, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert (half.name, full.name) == (f"native-{fixed.isa}-fixed", f"native-{fixed.isa}")
    linear = half.linear(weight)
    assert isinstance(linear, FixedLinear) and isinstance(full.linear(weight), PackedLinear)
    assert linear.weight_rows(5, 66).shape == (61, 96)
