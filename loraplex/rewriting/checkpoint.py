"""Rewrites a base's safetensors files tensor by tensor, with only a few rows in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loraplex.adapter_format.geometry import refuse_pickled
from loraplex.adapter_format.safetensors_header import (
    DTYPE_BYTES,
    TensorInfo,
    encode_header,
    parse_header,
    read_prefix,
)
from loraplex.errors import InvalidAdapter
from loraplex.rewriting.tensors import STORED, Array, read_rows, stored_bytes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_CHUNK_VALUES = 8 << 20
"""Number of values of a tensor that are in memory at once."""

RowsOf = Callable[[int, int], Array]
"""Rows [begin, end) of a tensor in float32."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor and the file that it is in."""

    path: Path
    info: TensorInfo

    def rows(self, begin: int, end: int) -> Array:
        """Rows [begin, end), fewer if the tensor has fewer."""
        return read_rows(self.path, self.info, begin, min(end, self.num_rows))

    @property
    def num_rows(self) -> int:
        """Length of the first dimension."""
        return self.info.shape[0] if self.info.shape else 1


@dataclass(frozen=True, slots=True)
class Edit:
    """The new content of a tensor."""

    shape: tuple[int, ...]
    rows: RowsOf


class CheckpointFolder:
    """The weights of a folder in Hugging Face layout."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidRequest or InvalidAdapter if a file is missing or damaged."""
        index = folder / INDEX_FILE
        if index.exists():
            weight_map = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        else:
            refuse_pickled(folder)
            names = [SINGLE_FILE]
        self.is_sharded = index.exists()
        self.files = {name: _tensors(folder / name) for name in names}
        self.tensors = {
            info.name: TensorLocation(folder / name, info)
            for name, infos in self.files.items()
            for info in infos
        }

    def write(
        self, out: Path, edits: Mapping[str, Edit], added: Mapping[str, str], dtype: str
    ) -> None:
        """Write the files again, with some tensors edited.

        Args:
            edits: new contents by tensor name; a name that is in no file adds a tensor.
            added: for each added name, the tensor whose file and dtype it gets.
            dtype: F16, BF16 or F32 for all floating-point tensors; "" = each keeps its own.

        Raises:
            InvalidAdapter: a value does not fit the dtype, or an edited tensor is not stored in
                floating point.
        """
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for file_name, infos in self.files.items():
            held = {info.name: info for info in infos}
            held |= {new: held[like] for new, like in added.items() if like in held}
            entries = [_entry(name, info, edits, dtype) for name, info in held.items()]
            total_bytes += sum(math.prod(shape) * DTYPE_BYTES[d] for _, shape, d in entries)
            with (out / file_name).open("wb") as sink:
                sink.write(encode_header((name, d, shape) for name, shape, d in entries))
                for name, shape, stored in entries:
                    self._write_tensor(name, shape, stored, edits, sink)
            weight_map |= dict.fromkeys(held, file_name)
        if self.is_sharded:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            (out / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: str,
        edits: Mapping[str, Edit],
        sink: BinaryIO,
    ) -> None:
        edit = edits.get(name)
        if edit is None:
            source = self.tensors[name]
            if stored == source.info.dtype:
                _copy(source, sink)
                return
            edit = Edit(shape, source.rows)
        for begin, end in _chunks(shape):
            rows = edit.rows(begin, end)
            if stored == "F16" and not (np.abs(rows) <= np.finfo(np.float16).max).all():
                description = "has values that float16 cannot hold; use --dtype bfloat16"
                raise InvalidAdapter.field(name, stored, description)
            sink.write(stored_bytes(rows, stored))


def _tensors(path: Path) -> tuple[TensorInfo, ...]:
    size = path.stat().st_size
    prefix = read_prefix(path, path.name)
    return parse_header(prefix, size, source=path.name, dtypes=DTYPE_BYTES).tensors


def _entry(
    name: str, info: TensorInfo, edits: Mapping[str, Edit], dtype: str
) -> tuple[str, tuple[int, ...], str]:
    """(name, shape, dtype) of a tensor as it will be written."""
    stored = dtype if dtype and info.dtype in STORED else info.dtype
    if name in edits and stored not in STORED:
        description = f"is stored as {stored}; only {', '.join(STORED)} can be merged into"
        raise InvalidAdapter.field(name, stored, description)
    return name, edits[name].shape if name in edits else info.shape, stored


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    num_rows = shape[0] if shape else 1
    step = max(1, _CHUNK_VALUES // max(1, math.prod(shape[1:])))
    for begin in range(0, num_rows, step):
        yield begin, min(begin + step, num_rows)


def _copy(source: TensorLocation, sink: BinaryIO) -> None:
    left = source.info.num_bytes
    with source.path.open("rb") as file:
        file.seek(source.info.begin)
        while left:
            data = file.read(min(left, 4 * _CHUNK_VALUES))
            sink.write(data)
            left -= len(data)
