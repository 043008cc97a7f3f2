"""Products with quantised weights under Triton's interpreter, or on a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from loraplex_services.worker.ops.linear import triton as fast
from loraplex_services.worker.ops.linear import units
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight
from loraplex_services.worker.ops.linear.reference import linear
from loraplex_services.worker.ops.linear.triton import TritonCodedLinear, is_readable
from tests.worker.native.code_weights import FLOATS, rows_between_nans, weight_in_codes
from tests.worker.ops.triton.conftest import INTERPRETING

KINDS = [
    ("int8", 10_000, False),
    ("int8", 32, True),
    ("int8", 128, False),
    ("int4", 10_000, True),
    ("int4", 32, False),
    ("int4", 64, True),
    ("int4", 128, True),
    ("float8", 10_000, False),
    ("float8", 64, False),
    ("float8", 128, False),
]
SHAPES = [(1, 1), (5, 7), (33, 100), (70, 300), (130, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = 2.0**-7 if INTERPRETING else 2.0**-8
"""Of bfloat16, to which the interpreter truncates."""


def on(device, weight):
    """The weight on a device."""
    fields = ("codes", "scales", "zeros", "order")
    found = {name: getattr(weight, name) for name in fields}
    return replace(weight, **{k: v.to(device) for k, v in found.items() if v is not None})


def assert_product(packed, weight, x):
    """What may differ: the rounding of sums and of outputs, and of weights for many rows."""
    dense, rows = weight.dequantised().cpu(), x.cpu()
    expected, magnitude = linear(rows, dense), linear(rows.abs(), dense.abs())
    found = packed.apply(x).cpu().double()
    allowed = 2e-6 * magnitude + 1e-9
    if x.dtype is not torch.float32:
        allowed += ROUNDING * expected.abs()
        if len(x) > fast.MAX_ROWS:
            allowed += ROUNDING * magnitude
    assert ((found - expected).abs() <= allowed).all(), len(x)


def products():
    """One of each kind, in one dtype or the other. All others are long."""
    for (index, kind), shape, dtype in itertools.product(enumerate(KINDS), SHAPES, DTYPES):
        is_short = shape == SHAPES[-2] and dtype is DTYPES[index % 2]
        yield pytest.param(kind, shape, dtype, marks=[] if is_short else [pytest.mark.long])


@pytest.mark.parametrize(("kind", "shape", "dtype"), list(products()))
def test_a_product_is_that_of_the_weight_which_the_codes_mean(device, kind, shape, dtype):
    code, group_size, has_zeros = kind
    weight = on(device, weight_in_codes(shape, code, group_size, has_zeros=has_zeros))
    packed = TritonCodedLinear(weight)
    for num_rows in (1, 17, 70):
        assert_product(packed, weight, rows_between_nans(num_rows, shape[1], dtype).to(device))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_weights_are_decoded_once_for_many_rows(device, kind, dtype, monkeypatch):
    monkeypatch.setattr(fast, "MAX_ROWS", 4)
    monkeypatch.setattr(fast, "MAX_EXPANDED_BYTES", 130 * 64 * dtype.itemsize)
    code, group_size, has_zeros = kind
    weight = on(device, weight_in_codes((150, 130), code, group_size, has_zeros=has_zeros))
    assert_product(TritonCodedLinear(weight), weight, rows_between_nans(5, 130, dtype).to(device))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (KINDS[0], torch.float32),
        (KINDS[3], torch.bfloat16),
        (KINDS[6], torch.float32),
        (KINDS[9], torch.bfloat16),
        pytest.param(KINDS[0], torch.bfloat16, marks=pytest.mark.long),
        pytest.param(KINDS[3], torch.float32, marks=pytest.mark.long),
        pytest.param(KINDS[6], torch.bfloat16, marks=pytest.mark.long),
        pytest.param(KINDS[9], torch.float32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sums_over_parts_of_the_inputs_are_the_same_in_every_batch(
    device, kind, dtype, monkeypatch
):
    monkeypatch.setattr(fast, "num_splits", lambda num_outputs, num_blocks: 3)
    code, group_size, has_zeros = kind
    weight = on(device, weight_in_codes((100, 1100), code, group_size, has_zeros=has_zeros))
    packed = TritonCodedLinear(weight)
    x = rows_between_nans(37, 1100, dtype).to(device)
    assert_product(packed, weight, x)
    together = packed.apply(x)
    for row in (0, 20, 36):
        for rows in (slice(row, row + 1), slice(row, None)):
            found = packed.apply(x[rows])
            if INTERPRETING:  # numpy adds up in an order that depends on the shape
                torch.testing.assert_close(found, together[rows], rtol=1e-4, atol=1e-3)
            else:
                assert found.equal(together[rows])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_the_weight_come_back_as_the_codes_mean_them(device, kind):
    code, group_size, has_zeros = kind
    weight = on(device, weight_in_codes((70, 45), code, group_size, has_zeros=has_zeros))
    packed, complete = TritonCodedLinear(weight), weight.dequantised()
    for begin, end in ((0, 70), (3, 3), (31, 33), (64, 70)):
        assert packed.weight_rows(begin, end).equal(complete[begin:end])


def test_float32_results_are_not_rounded_to_the_type_of_the_rows(device):
    weight = on(device, weight_in_codes((70, 100), "int8", 10_000))
    packed, x = TritonCodedLinear(weight), rows_between_nans(3, 100, torch.bfloat16).to(device)
    found, expected = packed.apply_float32(x), linear(x.cpu(), weight.dequantised().cpu())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_outputs", [1, 64, 4096, 6144, 28672])
def test_every_tile_whose_inputs_are_divided_has_a_ticket(num_outputs, monkeypatch):
    weight = weight_in_codes((num_outputs, 1), "float8", 10_000)
    monkeypatch.setattr(fast, "num_splits", lambda num_outputs, num_blocks: 8)
    packed = TritonCodedLinear(weight)
    choices = fast.tilings(num_outputs, "fp8", torch.bfloat16, 1 << 30, is_grouped=False)
    for num_rows in range(1, fast.MAX_ROWS + 1):
        if packed._num_splits_of(num_rows) > 1:
            tiling = fast.tiling_for(num_rows, choices)
            row_tiles = -(-num_rows // tiling.block_rows)
            assert -(-num_outputs // tiling.block_outputs) * row_tiles <= len(packed._tickets)


def test_columns_in_another_order_meet_their_inputs(device):
    plain = weight_in_codes((20, 64), "int4", 32, has_zeros=True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    weight = on(
        device, CodedWeight("test", plain.codes, plain.scales, 32, plain.zeros, plain.table, order)
    )
    packed, x = TritonCodedLinear(weight), rows_between_nans(4, 64, torch.float32).to(device)
    assert_product(packed, weight, x)
    assert packed.weight_rows(0, 20).equal(weight.dequantised())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_every_float8_number_is_decoded_exactly(device, dtype, many, monkeypatch):
    if many:
        monkeypatch.setattr(fast, "MAX_ROWS", 0)
    values = FLOATS[~FLOATS.float().isnan()]
    codes = values[:, None].repeat(1, 128)
    weight = on(device, CodedWeight("test", codes, torch.ones(254, 1), 128))
    x = torch.eye(128, dtype=dtype, device=device)[::31]  # both lanes of a unit
    found = TritonCodedLinear(weight).apply(x)
    assert found.float().cpu().equal(values.float().expand(len(x), -1))


def test_a_code_takes_the_bits_of_its_kind(device):
    for kind, num_bytes in (("int4", 0.5), ("int8", 1), ("float8", 1)):
        packed = TritonCodedLinear(on(device, weight_in_codes((256, 512), kind, 10_000)))
        assert packed._units.nbytes == num_bytes * 256 * 512


@pytest.mark.parametrize(("kind", "values"), [("int4", 16), ("int8", 256), ("fp8", 256)])
def test_codes_come_out_of_units_as_they_went_in(kind, values):
    codes = torch.randint(0, values, (9, 256), dtype=torch.uint8)
    packed = units.packed(codes[:, :250], kind, 32)
    assert packed.dtype is torch.int16
    found = units.unpacked(packed, kind, 32)
    assert found[:, :250].equal(codes[:, :250])
    assert not found[:, 250:].any()


def test_codes_that_the_kernel_does_not_read_are_known():
    floats, table = weight_in_codes((2, 640), "float8", 64), weight_in_codes((2, 64), "int4", 32)
    assert is_readable(floats)
    assert is_readable(table)
    assert not is_readable(replace(floats, codes=torch.zeros(2, 640).to(torch.float8_e5m2)))
    assert not is_readable(replace(table, table=INTEGERS / 2))
    assert not is_readable(weight_in_codes((2, 64), "int4", 32, has_zeros=0.37))
    for group_size in (16, 40, 96):
        assert not is_readable(weight_in_codes((2, 640), "int8", group_size))


@pytest.mark.skipif(INTERPRETING, reason="takes hours under the interpreter")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(6144, 4096), (28672, 4096), (4096, 14336)], ids=str)
def test_products_of_real_widths_equal_float64(device, shape, kind):
    code, group_size, has_zeros = kind
    weight = on(device, weight_in_codes(shape, code, group_size, has_zeros=has_zeros))
    packed, dense = TritonCodedLinear(weight), weight.dequantised().double()
    x = rows_between_nans(300, shape[1], torch.bfloat16).to(device)
    expected, magnitude = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    for num_rows in (1, 2, 16, 17, 64, 65, 129, 256, 300):
        found = packed.apply(x[:num_rows]).double()
        allowed = 2e-6 * magnitude[:num_rows] + expected[:num_rows].abs() / 2**8
        if num_rows > fast.MAX_ROWS:
            allowed += magnitude[:num_rows] / 2**9
        assert ((found - expected[:num_rows]).abs() <= allowed).all(), num_rows
    together = packed.apply(x[:64])
    assert packed.apply(x[5:6]).equal(together[5:6])
