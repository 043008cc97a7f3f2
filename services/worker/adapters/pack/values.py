"""Reads published tensors as numpy arrays and converts between float types. No torch.

numpy has no bfloat16, so such an array contains the bits as uint16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo
from loraplex.errors import InvalidAdapter, Violation

ITEM_TYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I8": np.int8,
}
MAX_INT8 = 127
_EXPONENT_BITS = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


class Values(NamedTuple):
    """A matrix or vector."""

    data: NDArray[Any]
    dtype: str
    """safetensors name."""

    def to(self, dtype: str) -> Values:
        """The nearest values in another type, halves to even."""
        if dtype == self.dtype:
            return self
        wide = _widened(self)
        if dtype == "BF16":
            return Values(_bfloat16_bits(wide), dtype)
        with np.errstate(over="ignore"):  # what becomes infinite is refused after it
            return Values(wide.astype(ITEM_TYPES[dtype]), dtype)

    def to_int8(self) -> tuple[Values, NDArray[np.float32]]:
        """Rows as integers of [-127, 127], and each row's float32 factor: row = factor * integers,
        off by half a factor at the most."""
        wide = _widened(self)
        factors = np.abs(wide).max(axis=1, initial=0.0) / np.float32(MAX_INT8)
        divisors = np.where(factors > 0, factors, np.float32(1))
        integers = np.rint(wide / divisors[:, None])
        return Values(integers.astype(np.int8), "I8"), factors

    def all_finite(self) -> bool:
        """False if any is NaN or infinite."""
        bits = self.data.view(np.uint32 if self.dtype == "F32" else np.uint16)
        mask: Any = bits.dtype.type(_EXPONENT_BITS[self.dtype])
        return not bool(((bits & mask) == mask).any())


def itemsize(dtype: str) -> int:
    """Bytes of one value."""
    return np.dtype(ITEM_TYPES[dtype]).itemsize


Read = Callable[[TensorInfo], Values]
"""Reads one tensor of the adapter's file."""


class TensorFile:
    """The tensors of a verified adapter folder, mapped, copied when they are written to."""

    def __init__(self, folder: Path) -> None:
        with (folder / TENSOR_FILE).open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._checked: set[str] = set()

    def read(self, info: TensorInfo) -> Values:
        """One tensor, in its shape.

        Raises:
            InvalidAdapter: it holds a NaN or an infinity.
        """
        item_type = ITEM_TYPES[info.dtype]
        count = info.num_bytes // itemsize(info.dtype)
        flat = np.frombuffer(self._bytes, item_type, count, info.begin)
        values = Values(flat.reshape(info.shape), info.dtype)
        if info.name not in self._checked:
            check_finite(values, info.name)
            self._checked.add(info.name)
        return values


def check_finite(values: Values, name: str) -> None:
    """Raises InvalidAdapter naming the tensor if a value is NaN or infinite."""
    if not values.all_finite():
        description = "holds a NaN or an infinity, or a number too large for the type served in"
        raise InvalidAdapter.of([Violation.of(TENSOR_FILE, name, description)])


def _widened(values: Values) -> NDArray[np.float32]:
    if values.dtype == "BF16":
        return (values.data.astype(np.uint32) << 16).view(np.float32)
    return values.data.astype(np.float32)


def _bfloat16_bits(wide: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; finite values only."""
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return (rounded >> 16).astype(np.uint16)
