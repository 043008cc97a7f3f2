"""Products of weights in codes, in every instruction set, against what the codes mean."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight
from loraplex_services.worker.ops.linear.cpu import GATES, CodedGate, CodedLinear, is_readable
from loraplex_services.worker.ops.linear.reference import linear
from tests.worker.native.code_weights import FLOATS, rows_between_nans, weight_in_codes
from tests.worker.native.isas import ISAS, PAIRED, native_choosing


@pytest.fixture(params=[*ISAS, *PAIRED])
def compiled(request):
    """Bfloat16 rows are read in digits or widened, and in pairs, whichever is faster here."""
    with native_choosing(request.param) as library:
        yield library


KINDS = [
    ("int8", 10_000, False),
    ("int8", 32, True),
    ("int4", 32, False),
    ("int4", 64, True),
    ("int4", 128, True),
    ("int4", 32, 0.37),
    ("int8", 16, False),
    ("float8", 10_000, False),
    ("float8", 64, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 100), (70, 300)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_product_is_that_of_the_weight_which_the_codes_mean(compiled, kind, shape, dtype):
    code, group_size, has_zeros = kind
    weight = weight_in_codes(shape, code, group_size, has_zeros=has_zeros)
    packed, dense = CodedLinear(compiled, weight), weight.dequantised()
    for num_rows in (1, 2, 5, 7, 13, 100):
        x = rows_between_nans(num_rows, shape[1], dtype)
        expected, magnitude = linear(x, dense), linear(x.abs(), dense.abs())
        error = (packed.apply(x).double() - expected).abs()
        # What may differ: the rounding of sums, of 16-bit inputs and of outputs.
        allowed = 2e-6 * magnitude + 1e-9
        if dtype is torch.bfloat16:
            steps = (x.abs().amax(1, keepdim=True).double() / 2**16).expand(x.shape)
            allowed += expected.abs() / 2**8 + linear(steps, dense.abs())
        assert (error <= allowed).all(), num_rows


@pytest.mark.parametrize("scales", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_are_read_in_the_type_of_the_files(compiled, scales):
    weight = weight_in_codes((40, 96), "int4", 32, scales=scales)
    x = rows_between_nans(3, 96, torch.float32)
    found = CodedLinear(compiled, weight).apply(x)
    torch.testing.assert_close(
        found.double(), linear(x, weight.dequantised()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100, 200), (40, 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(compiled, kind, shape, dtype):
    code, group_size, has_zeros = kind
    weight = CodedLinear(compiled, weight_in_codes(shape, code, group_size, has_zeros=has_zeros))
    x = rows_between_nans(131, shape[1], dtype)
    alone = torch.cat([weight.apply(row) for row in x.split(1)])
    for num_rows in (3, 5, 8, 9, 16, 17, 32, 37, 131):
        assert weight.apply(x[:num_rows]).equal(alone[:num_rows]), num_rows


@pytest.mark.parametrize("kind", [("int4", 64), ("int4", 32), ("int8", 32)], ids=str)
def test_a_row_of_tiny_inputs_does_not_depend_on_its_neighbours(compiled, kind):
    """Factors of such rows are hardly above the smallest numbers of float32."""
    weight = CodedLinear(compiled, weight_in_codes((40, 256), *kind))
    x = rows_between_nans(17, 256, torch.bfloat16) * 2.0**-116
    alone = torch.cat([weight.apply(row) for row in x.split(1)])
    for num_rows in (3, 8, 9, 17):
        assert weight.apply(x[:num_rows]).equal(alone[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_of_nan_are_nan(compiled, kind, dtype):
    code, group_size, has_zeros = kind
    weight = CodedLinear(
        compiled, weight_in_codes((40, 200), code, group_size, has_zeros=has_zeros)
    )
    for num_rows, at in ((1, 0), (3, 100), (17, 199)):
        x = rows_between_nans(num_rows, 200, dtype)
        expected = weight.apply(x)
        x[num_rows // 2, at] = expected[num_rows // 2] = float("nan")
        torch.testing.assert_close(weight.apply(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [("int8", 10_000), ("int4", 64), ("float8", 64)], ids=str)
def test_the_best_output_is_the_first_of_the_largest(compiled, kind, dtype):
    half = weight_in_codes((1500, 64), *kind)
    twice = replace(half, codes=half.codes.repeat(2, 1), scales=half.scales.repeat(2, 1))
    for weight in (half.outputs([(0, 70)]), twice):
        packed = CodedLinear(compiled, weight)
        x = rows_between_nans(200, 64, dtype)
        x[2], x[6], x[8, 5] = float("nan"), 0, float("inf")
        for num_rows in (1, 2, 9, 200):
            logits = packed.apply(x[:num_rows]).float()
            assert packed.best(x[:num_rows]).tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", sorted(GATES))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_joined_gates_have_the_bits_of_separate_ones(compiled, kind, operation, dtype):
    code, group_size, has_zeros = kind
    weight = weight_in_codes((96, 200), code, group_size, has_zeros=has_zeros)
    packed, joined = CodedLinear(compiled, weight), CodedGate(compiled, weight, operation)
    for num_rows in (1, 3, 8, 9, 100):
        x = rows_between_nans(num_rows, 200, dtype) / 100
        expected = packed.apply(x)
        assert joined.apply(x).equal(expected), num_rows
        gates, others = expected.chunk(2, dim=1)
        assert joined.gated(x).equal(compiled.elementwise(operation, gates, others)), num_rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_gates_come_back_in_the_order_of_the_weight(compiled, kind):
    code, group_size, has_zeros = kind
    weight = weight_in_codes((192, 45), code, group_size, has_zeros=has_zeros)
    joined, complete = CodedGate(compiled, weight, Operation.SILU), weight.dequantised()
    for begin, end in ((0, 192), (5, 6), (7, 7), (90, 101), (96, 192), (100, 171)):
        assert joined.weight_rows(begin, end).equal(complete[begin:end])


class LargestFloats(TorchDispatchMode):
    """Notes the most rows of a float32 tensor that torch makes."""

    num_rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.num_rows = max(self.num_rows, len(result))
        return result


def test_rows_on_both_sides_of_the_last_gate_do_not_widen_the_whole_weight(compiled):
    weight = weight_in_codes((1024, 45), "int8", 32)
    joined, complete = CodedGate(compiled, weight, Operation.SILU), weight.dequantised()
    with LargestFloats() as largest:
        rows = joined.weight_rows(500, 530)
    assert rows.equal(complete[500:530])
    assert largest.num_rows <= 64


@pytest.mark.parametrize(
    ("activation", "num_outputs", "made"),
    [("silu", 64, CodedGate), ("relu", 64, CodedLinear), ("silu", 48, CodedLinear)],
)
def test_gates_that_no_kernel_joins_stay_two_operators(compiled, activation, num_outputs, made):
    weight = weight_in_codes((num_outputs, 32), "int8", 32)
    operators = NativeOperators(compiled, torch.bfloat16)
    assert type(operators.coded_linear(weight, torch.bfloat16, activation)) is made
    assert type(operators.coded_linear(weight, torch.bfloat16)) is CodedLinear


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_the_weight_come_back_as_the_codes_mean_them(compiled, kind):
    code, group_size, has_zeros = kind
    weight = weight_in_codes((70, 45), code, group_size, has_zeros=has_zeros)
    packed, complete = CodedLinear(compiled, weight), weight.dequantised()
    for begin, end in ((0, 70), (3, 3), (31, 33), (64, 70)):
        assert packed.weight_rows(begin, end).equal(complete[begin:end])


def test_columns_in_another_order_meet_their_inputs(compiled):
    plain = weight_in_codes((20, 64), "int4", 32, has_zeros=True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    weight = CodedWeight("test", plain.codes, plain.scales, 32, plain.zeros, plain.table, order)
    packed, x = CodedLinear(compiled, weight), rows_between_nans(4, 64, torch.float32)
    expected = linear(x, weight.dequantised())
    torch.testing.assert_close(packed.apply(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert packed.weight_rows(0, 20).equal(weight.dequantised())


def test_rows_of_zeros_give_zeros(compiled):
    packed = CodedLinear(compiled, weight_in_codes((33, 64), "int4", 32, has_zeros=True))
    for dtype in (torch.float32, torch.bfloat16):
        assert packed.apply(torch.zeros(2, 64, dtype=dtype)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_float8_number_is_widened_exactly(compiled, dtype):
    values = FLOATS[~FLOATS.float().isnan()]
    weight = CodedWeight("float8", values[:, None].repeat(1, 4), torch.ones(254, 1), 4)
    packed = CodedLinear(compiled, weight)
    for column in range(4):
        x = torch.eye(4, dtype=dtype)[column : column + 1]
        assert packed.apply(x)[0].equal(values.to(dtype))


@pytest.mark.parametrize(("kind", "num_bytes"), [("int4", 0.5), ("int8", 1), ("float8", 1)])
def test_a_code_takes_the_bytes_of_its_kind(compiled, kind, num_bytes):
    packed = CodedLinear(compiled, weight_in_codes((256, 512), kind, 10_000))
    own = packed._weight
    assert (own.codes.nbytes, own.scales.nbytes) == (num_bytes * 256 * 512, 256 * 2)


def test_codes_that_the_kernel_does_not_read_are_known():
    floats, table = weight_in_codes((2, 64), "float8", 64), weight_in_codes((2, 64), "int4", 64)
    assert is_readable(floats)
    assert is_readable(table)
    assert not is_readable(replace(floats, zeros=torch.ones(2, 1)))
    assert not is_readable(replace(floats, codes=torch.zeros(2, 64).to(torch.float8_e5m2)))
    assert not is_readable(replace(table, table=INTEGERS / 2))
    assert not is_readable(weight_in_codes((2, 64), "int4", 40))
