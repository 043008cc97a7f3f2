"""Reads adapter tensors as float32 arrays, and writes PEFT folders from arrays."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex.adapter_format import (
    CONFIG_FILE,
    TENSOR_FILE,
    AdapterFolder,
    Geometry,
    Report,
    parse_header,
    validate,
)
from loraplex.adapter_format.folder import file_names, read_folder
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import (
    DTYPE_BYTES,
    TensorInfo,
    encode_header,
    read_prefix,
)
from loraplex.adapter_format.tasks import CAUSAL_LM
from loraplex.adapter_format.tensor_scan import scan_file
from loraplex.client.publishing import read_adapter
from loraplex.errors import AlreadyExists, InvalidAdapter, InvalidRequest
from loraplex.new_folder import make_partial, move_into

Array = npt.NDArray[np.float32]

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The numpy type of each dtype; bfloat16 is read and written as its bits."""
_MAX_RANK = 1 << 20
"""Largest rank that is read or written here. It may be more than a registry or a worker accepts."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A validated adapter whose tensors can be read."""

    content: AdapterFolder
    report: Report
    config: Mapping[str, object]
    """Content of its adapter_config.json."""

    def tensor(self, info: TensorInfo) -> Array:
        """A tensor as float32, whatever its stored dtype."""
        return read_tensor(self.content.tensor_path, info)

    def pair(self, module: AdapterModule) -> tuple[Array, Array]:
        """A `[rank, in]` and B `[out, rank]` of a module, also of one expert."""
        a_info, b_info = module.a or module.embedding_a, module.b or module.embedding_b
        assert a_info is not None and b_info is not None, "validated as a pair"
        a, b = self.tensor(a_info), self.tensor(b_info)
        if module.expert is not None:
            index = module.expert.index
            a = a[index * module.rank : (index + 1) * module.rank]
            b = b[:, index :: module.expert.num_experts]
        return a, b


def read_rows(path: Path, info: TensorInfo, begin: int, end: int) -> Array:
    """Rows [begin, end) of a tensor in a safetensors file, as float32; none if `end` <= `begin`."""
    num_rows = max(0, end - begin)
    row_values = math.prod(info.shape[1:])
    raw = np.fromfile(
        path,
        dtype=STORED[info.dtype],
        count=num_rows * row_values,
        offset=info.begin + begin * row_values * DTYPE_BYTES[info.dtype],
    )
    if info.dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32).reshape(num_rows, *info.shape[1:])


def read_tensor(path: Path, info: TensorInfo) -> Array:
    """A whole tensor, as float32."""
    return read_rows(path, info, 0, info.shape[0] if info.shape else 1)


def read_tensors(path: Path) -> dict[str, Array]:
    """All tensors of a safetensors file, as float32."""
    return {info.name: read_tensor(path, info) for info in tensor_infos(path)}


def tensor_infos(path: Path) -> tuple[TensorInfo, ...]:
    """What the header of a safetensors file says about each tensor."""
    return parse_header(read_prefix(path), path.stat().st_size).tensors


def open_adapter(folder: Path, geometry: Geometry | None = None, **changes: object) -> Opened:
    """Read and validate a folder, as if its config had the fields `changes`.

    Raises:
        InvalidAdapter: it is not a valid adapter, or not one of the base of `geometry`.
    """
    content = read_adapter(folder)
    raw = content.config_bytes
    if changes:
        raw = json.dumps({**json.loads(raw), **changes}).encode()
    report = _checked(content, raw, geometry)
    if report.config.task != CAUSAL_LM:
        description = f"is not rewritten; only adapters of task_type {CAUSAL_LM} are"
        field = f"{CONFIG_FILE}:task_type"
        raise InvalidAdapter.field(field, report.config.task, description)
    return Opened(content, report, json.loads(raw))


def write_adapter(
    out: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Array],
    dtype: str,
    geometry: Geometry | None = None,
) -> Report:
    """Write a PEFT folder. It appears only if it is complete and valid.

    Args:
        out: new, or an empty folder.
        dtype: F16, BF16 or F32.

    Raises:
        AlreadyExists: `out` is not empty.
        InvalidAdapter: the result is not valid, for example because a value overflowed `dtype`.
    """
    with new_folder(out) as partial:
        write_files(partial, config, tensors, dtype)
        return check_folder(partial, geometry)


def rewrite_folder(
    folder: Path,
    out: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Array],
    dtype: str = "",
    geometry: Geometry | None = None,
) -> Report:
    """Write a PEFT folder with the other files of `folder`, such as its tokenizer.

    Args:
        dtype: F16, BF16 or F32; "" = that of all tensors of `folder`, or F32, which holds them all.
    """
    dtypes = {info.dtype for info in tensor_infos(folder / TENSOR_FILE)}
    own = dtypes.pop() if len(dtypes) == 1 else "F32"
    names = [name for name in file_names(folder) if name not in (CONFIG_FILE, TENSOR_FILE)]
    with new_folder(out) as partial:
        copy_files(folder, partial, names)
        write_files(partial, config, tensors, dtype or own)
        return check_folder(partial, geometry)


def write_files(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Array], dtype: str
) -> None:
    """Write an adapter's config and tensors; `dtype` is F16, BF16 or F32."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / TENSOR_FILE).write_bytes(_safetensors(tensors, dtype))


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy some of an adapter's files."""
    for name in names:
        shutil.copyfile(source / name, target / name)


def check_folder(folder: Path, geometry: Geometry | None = None) -> Report:
    """Validate a folder that was just written, including its values.

    Raises:
        InvalidAdapter: the result is not a valid adapter, or not one of the base of `geometry`.
    """
    made = read_folder(folder)
    return _checked(made, made.config_bytes, geometry)


def _checked(content: AdapterFolder, config: bytes, geometry: Geometry | None) -> Report:
    """The report of a folder and its values, as if it had this config."""
    prefix, size = content.header_prefix, content.tensor_file_size
    report = validate(config, prefix, size, content.files, geometry, _MAX_RANK, allow_missing=True)
    scan_file(content.tensor_path, parse_header(prefix, size))
    return report


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end, or is deleted on failure.

    Raises:
        InvalidRequest: `out` is a file.
        AlreadyExists: `out` is not empty.
    """
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()):
        raise AlreadyExists(f"{out} is not empty; name a new folder")
    partial = make_partial(out)
    try:
        yield partial
        move_into(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _safetensors(tensors: Mapping[str, Array], dtype: str) -> bytes:
    entries = sorted(tensors.items())
    header = encode_header((name, dtype, array.shape) for name, array in entries)
    return b"".join([header, *(stored_bytes(array, dtype) for _, array in entries)])


def stored_bytes(array: Array, dtype: str) -> bytes:
    """The bytes of an array in a file; BF16 is rounded to nearest, ties to even."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype=STORED[dtype]).tobytes()
    bits = np.ascontiguousarray(array, dtype="<f4").view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
