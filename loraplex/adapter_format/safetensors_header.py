"""Parses, checks and writes the header of a safetensors file.

A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes. The JSON
maps each tensor to its dtype, shape and byte range; the ranges must cover the rest of the file
without gaps or overlaps. Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.strict_json import kind_of, read_object
from loraplex.errors import InvalidAdapter

TENSOR_FILE = "adapter_model.safetensors"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_TENSORS = 50_000
MAX_COMMAS = 6 * MAX_TENSORS
"""A matrix has five commas. A file with many more would only cost memory to parse."""
MAX_DIMENSIONS = 8
MAX_NAME_CHARS = 512

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
ADAPTER_DTYPES = frozenset({"F16", "BF16", "F32"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    dtype: str
    """safetensors name of the type: F16, BF16, F32..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte, counted from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors of a file, in the order of their bytes."""

    tensors: tuple[TensorInfo, ...]
    header_bytes: int
    """Length word and JSON together: where the first tensor begins."""
    metadata: dict[str, str]


def prefix_bytes(first: bytes, file_size: int, source: str = TENSOR_FILE) -> int:
    """How many bytes from the start of the file `parse_header` needs.

    Args:
        first: at least the first 8 bytes of the file.
        file_size: size of the whole file in bytes.

    Raises:
        InvalidAdapter: the length word cannot be true.
    """
    if file_size < LENGTH_BYTES or len(first) < LENGTH_BYTES:
        _refuse(source, f"{file_size} bytes", "is too short for safetensors; upload it whole")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        limit = f"more than the {MAX_HEADER_BYTES} allowed; is this a safetensors file?"
        _refuse(source, f"header of {length} bytes", limit)
    if LENGTH_BYTES + length > file_size:
        found = f"header of {length} bytes in a file of {file_size}"
        _refuse(source, found, "ends inside its header; it was cut off, upload it whole")
    return LENGTH_BYTES + length


def read_prefix(path: Path, source: str = TENSOR_FILE) -> bytes:
    """The start of a file on disk, as much as `parse_header` needs.

    Raises:
        InvalidAdapter: the length word cannot be true.
    """
    with path.open("rb") as file:
        first = file.read(LENGTH_BYTES)
        return first + file.read(prefix_bytes(first, path.stat().st_size, source) - len(first))


def parse_header(
    prefix: bytes,
    file_size: int,
    *,
    source: str = TENSOR_FILE,
    dtypes: Iterable[str] = ADAPTER_DTYPES,
) -> Header:
    """Read and check a header.

    Args:
        prefix: the file's first bytes, at least `prefix_bytes(...)` of them.
        file_size: size of the whole file in bytes.
        source: name of the file in violations.
        dtypes: the types to accept.

    Raises:
        InvalidAdapter: with one violation per bad tensor, field `source` or `source:<tensor>`.
    """
    header_bytes = prefix_bytes(prefix, file_size, source)
    raw = prefix[LENGTH_BYTES:header_bytes]
    if len(prefix) < header_bytes:
        _refuse(source, f"{len(prefix)} bytes", f"{header_bytes} bytes of header are needed")
    if not raw.startswith(b"{"):
        _refuse(source, raw[:16].hex(), "has no JSON header; is this a safetensors file?")
    if raw.count(b",") > MAX_COMMAS:
        _refuse(source, f"{raw.count(b',')} commas", f"holds more than {MAX_TENSORS} tensors")
    table = read_object(raw, source, MAX_HEADER_BYTES)
    metadata = _metadata(table.pop("__metadata__", {}), source)
    if len(table) > MAX_TENSORS:
        _refuse(source, f"{len(table)} tensors", f"holds more than {MAX_TENSORS} tensors")
    if not table:
        _refuse(source, "0 tensors", "holds no tensors; save the adapter again")
    return Header(_tensors(table, header_bytes, file_size, source, dtypes), header_bytes, metadata)


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """The header of a file of these tensors, (name, dtype, shape), whose bytes follow in order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _refuse(source: str, value: object, description: str) -> NoReturn:
    raise InvalidAdapter.field(source, value, description)


def _metadata(value: object, source: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _refuse(f"{source}:__metadata__", value, "must map strings to strings")
    return value


def _tensors(
    table: dict[str, object],
    header_bytes: int,
    file_size: int,
    source: str,
    dtypes: Iterable[str],
) -> tuple[TensorInfo, ...]:
    findings = Findings()
    tensors = []
    for name, entry in table.items():
        problem = _name_problem(name) or _entry_problem(entry, dtypes)
        if problem:
            findings.refuse(f"{source}:{name[:MAX_NAME_CHARS]}", *problem)
        elif isinstance(entry, dict):
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            info = TensorInfo(name, entry["dtype"], shape, header_bytes + begin, header_bytes + end)
            tensors.append(info)
    findings.raise_if_refused()
    tensors.sort(key=lambda info: (info.begin, info.end))
    _check_tiling(tensors, header_bytes, file_size, source)
    return tuple(tensors)


def _name_problem(name: str) -> tuple[object, str] | None:
    if not name or len(name) > MAX_NAME_CHARS:
        return f"{len(name)} characters", f"a tensor name has 1 to {MAX_NAME_CHARS} characters"
    if not name.isascii() or not name.isprintable():
        return ascii(name), "a tensor name is printable ASCII"
    return None


def _entry_problem(entry: object, dtypes: Iterable[str]) -> tuple[object, str] | None:
    """The fault of one tensor's description, as (value, description); None = it is right."""
    if not isinstance(entry, dict):
        return entry, f"must be an object with dtype, shape and data_offsets, not {kind_of(entry)}"
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        return sorted(entry), "must have exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or dtype not in dtypes:
        return dtype, f"dtype must be one of {', '.join(sorted(dtypes))}; cast it and save again"
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        return shape, f"shape must be a list of at most {MAX_DIMENSIONS} sizes"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return offsets, "data_offsets must be [begin, end] with begin <= end"
    num_bytes = DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
    if num_bytes != (found := offsets[1] - offsets[0]):
        return offsets, f"dtype {dtype} and shape {shape} need {num_bytes} bytes, not {found}"
    return None


def _are_sizes(value: object) -> bool:
    """Whether it is a list of non-negative integers that fit 63 bits."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_tiling(
    tensors: list[TensorInfo], header_bytes: int, file_size: int, source: str
) -> None:
    """Refuse gaps, overlaps and bytes that belong to no tensor."""
    position = header_bytes
    for info in tensors:
        if info.begin != position:
            word = "overlaps the tensor before it" if info.begin < position else "leaves a gap"
            found = f"[{info.begin - header_bytes}, {info.end - header_bytes}]"
            _refuse(f"{source}:{info.name}", found, f"{word}; save the file again")
        position = info.end
    if position != file_size:
        word = "cut off" if position > file_size else "followed by bytes of no tensor"
        found = f"{file_size} bytes, {position} expected"
        _refuse(source, found, f"is {word}; upload the file whole")
