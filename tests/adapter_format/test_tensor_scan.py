"""No NaN and no infinity passes, wherever it stands and however the bytes are cut."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_format import parse_header, tensor_scan
from loraplex.adapter_format.tensor_scan import (
    TensorScan,
    first_non_finite,
    warnings_of_zeros,
)
from loraplex.errors import InvalidAdapter
from tests.adapter_format import builders
from tests.adapter_format.builders import Adapter, Tensor, tiny_geometry


def is_finite(dtype: str, bits: int) -> bool:
    """By unpacking; a bfloat16 is the upper half of a float32."""
    if dtype == "F16":
        return math.isfinite(struct.unpack("<e", bits.to_bytes(2, "little"))[0])
    if dtype == "BF16":
        bits <<= 16
    return math.isfinite(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


@pytest.fixture(params=["numpy", "without"])
def _arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(tensor_scan, "_numpy", lambda: None)
    else:
        pytest.importorskip("numpy")


@pytest.mark.usefixtures("_arithmetic")
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_sixteen_bit_value_is_judged_right(dtype: str) -> None:
    for bits in range(2**16):
        found = first_non_finite(dtype, bits.to_bytes(2, "little"))
        assert (found is None) == is_finite(dtype, bits)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0x7F7FFFFF])))
def test_the_first_bad_float_is_found(values: list[int]) -> None:
    data = b"".join(value.to_bytes(4, "little") for value in values)
    expected = next((i for i, bits in enumerate(values) if not is_finite("F32", bits)), None)
    assert first_non_finite("F32", data) == expected
    assert tensor_scan._first_non_finite("F32", data) == expected


def file_with(bad: bytes, dtype: str, element: int) -> bytes:
    """Three tensors of five elements, the second with one bad element."""
    tensors = {name: Tensor(dtype, (5,)) for name in ("x", "y", "z")}
    data = bytearray(builders.tensor_file(tensors))
    size = len(bad)
    start = len(data) - 10 * size + element * size
    data[start : start + size] = bad
    return bytes(data)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        ("F32", struct.pack("<f", math.nan)),
        ("F32", struct.pack("<f", -math.inf)),
        ("F16", struct.pack("<e", math.inf)),
        ("F16", b"\x01\x7c"),
        ("BF16", b"\x80\x7f"),
        ("BF16", b"\xc1\xff"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 1000])
def test_a_bad_element_is_named_whatever_the_chunks(
    dtype: str, bad: bytes, chunk_bytes: int
) -> None:
    data = file_with(bad, dtype, element=3)
    scan = TensorScan(parse_header(data, len(data)))
    with pytest.raises(InvalidAdapter) as caught:
        for start in range(0, len(data), chunk_bytes):
            scan.feed(data[start : start + chunk_bytes])
    (violation,) = caught.value.violations
    assert violation.field == "adapter_model.safetensors:y"
    assert violation.value == "element 3"


@pytest.mark.parametrize("chunk_bytes", [1, 5, 64, 4096])
def test_zero_tensors_are_listed(chunk_bytes: int) -> None:
    tensors = {
        "x": Tensor("F32", (3,)),
        "empty": Tensor("F32", (0,)),
        "y": Tensor("F16", (9,), b"\x00\x00"),
        "z": Tensor("BF16", (2, 2)),
    }
    data = builders.tensor_file(tensors)
    scan = TensorScan(parse_header(data, len(data)))
    for start in range(0, len(data), chunk_bytes):
        scan.feed(data[start : start + chunk_bytes])
    assert scan.finish() == {"y", "empty"}


def test_missing_and_extra_bytes_are_refused() -> None:
    data = builders.tensor_file({"x": Tensor("F32", (3,))})
    for damaged in (data[:-1], data + b"\x00"):
        scan = TensorScan(parse_header(data, len(data)))
        scan.feed(damaged)
        with pytest.raises(InvalidAdapter, match="whole"):
            scan.finish()


def test_an_adapter_that_changes_nothing_is_warned_about() -> None:
    adapter = Adapter()
    report = adapter.validate(tiny_geometry())
    all_b = frozenset(module.b.name for module in report.modules if module.b)
    assert warnings_of_zeros(report, frozenset()) == ()
    assert warnings_of_zeros(report, all_b - {min(all_b)}) == ()
    (warning,) = warnings_of_zeros(report, all_b)
    assert "changes nothing" in warning.description
