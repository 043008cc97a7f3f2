"""Scans a stream of tensor values for NaN, infinity, and tensors that are all zeros.

A float is NaN or infinite exactly if all bits of its exponent are ones. With numpy, which servers
have, elements are doubled as integers to drop the sign and the largest is compared. Without it, as
the exponent lies in the one (F16) or two (BF16, F32) highest bytes, the scan takes every n-th byte
and lets `bytes.translate` look at them: ten times slower, but an order of magnitude faster than
unpacking floats. The position of a bad element is always found in the second way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from loraplex.adapter_format.report import Report
from loraplex.adapter_format.safetensors_header import DTYPE_BYTES, TENSOR_FILE, Header, TensorInfo
from loraplex.errors import InvalidAdapter, Violation
from loraplex.units import counted

CHUNK_BYTES = 1024 * 1024

_SMALLEST_DOUBLED = {"F16": 0xF800, "BF16": 0xFF00, "F32": 0xFF000000}
"""The smallest doubled element whose exponent is all ones."""

_F16_ONES = bytes(high & 0x7C == 0x7C for high in range(256))
_SEVEN_ONES = bytes(high & 0x7F == 0x7F for high in range(256))
_HIGHEST_ONE = bytes(byte >= 0x80 for byte in range(256))
_F16_FINITE = bytes(high for high in range(256) if not _F16_ONES[high])
_SURELY_FINITE = bytes(high for high in range(256) if not _SEVEN_ONES[high])


def first_non_finite(dtype: str, data: bytes | memoryview) -> int | None:
    """Index of the first NaN or infinite element; None if all are finite.

    Args:
        dtype: F16, BF16 or F32.
        data: whole elements, little-endian.
    """
    numpy = _numpy()
    if numpy is not None and _all_finite(numpy, dtype, data):
        return None
    return _first_non_finite(dtype, bytes(data))


def _all_finite(numpy: ModuleType, dtype: str, data: bytes | memoryview) -> bool:
    elements = numpy.frombuffer(data, f"<u{DTYPE_BYTES[dtype]}")
    if not elements.size:
        return True
    return bool((elements + elements).max() < _SMALLEST_DOUBLED[dtype])


@functools.cache
def _numpy() -> ModuleType | None:
    """numpy, imported at the first scan: a command that scans nothing starts faster without it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _first_non_finite(dtype: str, data: bytes) -> int | None:
    """As `first_non_finite`, without numpy."""
    step = DTYPE_BYTES[dtype]
    high = data[step - 1 :: step]
    if dtype == "F16":
        if not high.translate(None, _F16_FINITE):
            return None
        return _first_one(int.from_bytes(high.translate(_F16_ONES), "little"))
    if not high.translate(None, _SURELY_FINITE):
        return None
    second = data[step - 2 :: step]
    ones = int.from_bytes(high.translate(_SEVEN_ONES), "little")
    ones &= int.from_bytes(second.translate(_HIGHEST_ONE), "little")
    return _first_one(ones) if ones else None


def _is_zero(data: bytes | memoryview) -> bool:
    """Whether every byte is 0. The first bytes nearly always decide."""
    return not any(data[:64]) and bytes(data).count(0) == len(data)


def _first_one(ones: int) -> int:
    """Index of the first byte that is 1."""
    return ((ones & -ones).bit_length() - 1) // 8


@dataclass(slots=True)
class TensorScan:
    """Fed a file's bytes in order, header included, in chunks of any size."""

    header: Header
    _position: int = 0
    _index: int = 0
    _carry: bytes = b""
    _all_zero: bool = True
    _zero_tensors: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes | memoryview) -> None:
        """Scan the next bytes of the file.

        Raises:
            InvalidAdapter: naming the tensor and the position of a NaN or an infinity.
        """
        begin = self._position
        self._position += len(chunk)
        chunk = memoryview(chunk)  # Cut without copying.
        while self._index < len(self.header.tensors):
            info = self.header.tensors[self._index]
            self._scan(info, chunk[max(info.begin - begin, 0) : max(info.end - begin, 0)])
            if info.end > self._position:
                return
            self._end_tensor(info)

    def finish(self) -> frozenset[str]:
        """Names of the tensors that are all zeros.

        Raises:
            InvalidAdapter: fewer or more bytes came than the header describes.
        """
        tensors = self.header.tensors
        expected = tensors[-1].end if tensors else self.header.header_bytes
        if self._position != expected:
            found = f"{self._position} bytes"
            raise InvalidAdapter.field(
                TENSOR_FILE, found, f"must have {expected} bytes; upload the file whole"
            )
        return frozenset(self._zero_tensors)

    def _scan(self, info: TensorInfo, data: bytes | memoryview) -> None:
        if self._carry:
            data = self._carry + data
        whole = len(data) - len(data) % DTYPE_BYTES[info.dtype]
        self._carry = bytes(data[whole:])
        data = data[:whole] if self._carry else data
        if self._all_zero:
            self._all_zero = _is_zero(data)
        index = first_non_finite(info.dtype, data)
        if index is not None:
            before = min(self._position, info.end) - len(self._carry) - len(data) - info.begin
            element = before // DTYPE_BYTES[info.dtype] + index
            description = "is NaN or infinite; the training diverged, use an earlier checkpoint"
            raise InvalidAdapter.field(
                f"{TENSOR_FILE}:{info.name}", f"element {element}", description
            )

    def _end_tensor(self, info: TensorInfo) -> None:
        if self._all_zero:
            self._zero_tensors.append(info.name)
        self._index += 1
        self._carry = b""
        self._all_zero = True


def scan_file(path: Path, header: Header) -> frozenset[str]:
    """Scan a file on disk; returns and raises as `TensorScan` does."""
    scan = TensorScan(header)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            scan.feed(chunk)
    return scan.finish()


def warnings_of_zeros(report: Report, zero_tensors: frozenset[str]) -> tuple[Violation, ...]:
    """One warning if every lora_B is zero, so that the adapter changes nothing.

    With DoRA, there is no warning, because its magnitudes may have changed.
    """
    lora_b = [module.b.name for module in report.modules if module.b]
    if report.config.use_dora or not lora_b or not zero_tensors.issuperset(lora_b):
        return ()
    description = "is zero in every module: the adapter changes nothing; was it trained?"
    return (Violation.of(f"{TENSOR_FILE}:lora_B", counted(len(lora_b), "tensor"), description),)
