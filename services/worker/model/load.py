"""Loads weights by name: from memory-mapped safetensors files, or random ones.

A model takes what it needs by name and shape and then calls `finish`; what is missing, of another
shape or left over is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from loraplex.adapter_format.geometry import refuse_pickled
from loraplex.adapter_format.quantised_tensors import FLOAT_DTYPES
from loraplex.adapter_format.text_model import FURTHER_TOKENS, is_wrapper, plain_names
from loraplex.client.progress import Progress, ignore_progress
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.config_reader import read_json_object, unreadable
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import WeightRows
from loraplex_services.worker.types.sharding import Span, within

logger = logging.getLogger(__name__)

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that old files carry and that are computed here."""


_HALF_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
HALF_DTYPES = frozenset({"BF16", "F16", "U8", "I8", "I32", "F8_E4M3"})
"""Types in files whose values half precision can hold, and the codes of quantised weights."""
SCALE_SUFFIXES = ("scale", "scale_inv", "scales")
"""Suffixes of tensors that belong to codes."""


@dataclass(frozen=True, slots=True)
class TensorWindow:
    """The part of a tensor that one tensor-parallel rank has."""

    rows: Sequence[Span]
    """Spans of one dimension, ascending; joined if there are several."""
    columns: Span | None = None
    """Span of the dimension after it; None = all."""
    dim: int = 0
    """The dimension that rows count."""

    def cut(self, source: Any) -> Tensor:
        """The window of a tensor, or of a tensor in a file."""
        others = (slice(None),) * self.dim
        columns = () if self.columns is None else (slice(*self.columns),)
        parts = [source[(*others, slice(*span), *columns)] for span in self.rows]
        return torch.cat(parts, dim=self.dim)

    def transposed(self) -> TensorWindow:
        """The window of weights `[experts, in, out]` whose outputs are dimension 1 here. It cuts
        only one of both."""
        if self.columns is None:
            return TensorWindow(self.rows, dim=2)
        return TensorWindow([self.columns], dim=1)


class Weights(Protocol):
    """Where a model gets its tensors from."""

    dtype: torch.dtype
    """The dtype of the model."""

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensor, or a window of it, in a dtype or else the model's, on the model's device.

        Args:
            shape: shape of the complete tensor.

        Raises:
            InvalidRequest: it is missing, or its shape is another.
        """
        ...

    def half_dtype(self, name: str) -> torch.dtype | None:
        """The type of a tensor in the files if that is half precision; otherwise None."""
        ...

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """A complete weight `[out, in]` in codes; None if it is plain."""
        ...

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """Complete rows of stacked tensors, (name, rows) each, for ranks that keep only a part."""
        ...

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        ...

    def finish(self) -> None:
        """Release the files. Raises InvalidRequest if a tensor was never taken."""
        ...


def take_rows(
    weights: Weights,
    parts: Sequence[tuple[str, int]],
    *columns: int,
    window: TensorWindow | None = None,
    keeps_half: bool = False,
) -> Tensor:
    """Tensors `[rows, *columns]` stacked by rows, (name, rows) each, or a window of the stack.

    Args:
        keeps_half: if all of them are published in one half-precision type, it is kept.
    """
    halves = {weights.half_dtype(name) for name, _ in parts} if keeps_half else {None}
    dtype = halves.pop() if len(halves) == 1 else None
    taken = [
        weights.take(name, (rows, *columns), own, dtype)
        for name, rows, own in parts_of(parts, window)
    ]
    return taken[0] if len(taken) == 1 else torch.cat(taken)


def parts_of(
    parts: Sequence[tuple[str, int]], window: TensorWindow | None
) -> list[tuple[str, int, TensorWindow | None]]:
    """The stacked tensors (name, rows) that a window overlaps, with the window of each."""
    if window is None:
        return [(name, rows, None) for name, rows in parts]
    found: list[tuple[str, int, TensorWindow | None]] = []
    begin = 0
    for name, rows in parts:
        if spans := within(window.rows, begin, begin + rows):
            found.append((name, rows, TensorWindow(spans, window.columns)))
        begin += rows
    return found


class Checkpoint:
    """safetensors files of a folder, one or sharded with `model.safetensors.index.json`."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = ignore_progress,
    ) -> None:
        self.dtype = dtype
        self._folder = folder
        self._device = device
        self._progress = progress
        self._stack = ExitStack()
        self._files = {path: self._open(path) for path in _weight_files(folder)}
        self._total_bytes = sum(path.stat().st_size for path in self._files)
        self._taken_bytes = 0
        stored = {name: path for path, file in self._files.items() for name in file.keys()}
        names = _names_in(folder, stored)
        self._file_of = {name: (stored[inner], inner) for name, inner in names.items()}
        self._left = {name for name in self._file_of if not name.endswith(_IGNORED_SUFFIXES)}

    def _ignore_further_tokens(self) -> None:
        ignored = {name for name in self._left if name.startswith(FURTHER_TOKENS)}
        if ignored:
            what = "the base's layers that predict further tokens are not used"
            logger.info(what, extra={"num_ignored_tensors": len(ignored)})
        self._left -= ignored

    def _open(self, path: Path) -> safe_open:
        try:
            file: safe_open = self._stack.enter_context(safe_open(str(path), framework="pt"))
        except Exception as error:
            raise unreadable(path, error) from error
        return file

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self._file_of

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read one tensor, or a window of it.

        Raises:
            InvalidRequest: when it is missing or its shape is another.
        """
        self._check_present(name)
        if dtype is None and not self.is_float(name):
            why = (
                "holds codes that quantization_config does not explain; serve a copy with it plain"
            )
            raise InvalidRequest.field(name, "quantised", why)
        path, inner = self._file_of[name]
        file = self._files[path]
        got, wanted = file.get_slice(inner).get_shape(), list(shape)
        if got != wanted:
            raise InvalidRequest.field(name, got, f"config.json asks for shape {wanted}")
        tensor = file.get_tensor(inner) if window is None else window.cut(file.get_slice(inner))
        self._count(name, tensor)
        # A copy: a view would keep the whole file mapped, and its pages resident in addition to the
        # packed weights.
        return tensor.to(self._device, dtype or self.dtype, copy=True)

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """These files have none: see `quantised.QuantisedCheckpoint`."""
        return None

    def stored(self, name: str) -> Tensor:
        """A tensor in its own shape and type, on the model's device. Raises as `take` does."""
        self._check_present(name)
        path, inner = self._file_of[name]
        tensor: Tensor = self._files[path].get_tensor(inner)
        self._count(name, tensor)
        return tensor.to(self._device, copy=True)

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds numbers of at least half precision."""
        path, inner = self._file_of[name]
        dtype: str = self._files[path].get_slice(inner).get_dtype()
        return dtype in FLOAT_DTYPES

    def half_dtype(self, name: str) -> torch.dtype | None:
        """See `Weights`."""
        if name not in self._file_of:
            return None
        path, inner = self._file_of[name]
        return _HALF_TYPES.get(self._files[path].get_slice(inner).get_dtype())

    def ignore(self, is_unused: Callable[[str], bool]) -> None:
        """Accept these tensors although the model does not take them."""
        self._left -= {name for name in tuple(self._left) if is_unused(name)}

    def _check_present(self, name: str) -> None:
        if name not in self._file_of:
            raise InvalidRequest.field(name, "missing", "the base's files lack this tensor")

    def _count(self, name: str, tensor: Tensor) -> None:
        self._left.discard(name)
        self._taken_bytes += tensor.nbytes
        self._progress("load", self._taken_bytes, self._total_bytes)

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """See `Weights`; the files are opened again for each read."""
        return StackedRows(parts, num_inputs, self._read_again)

    def _read_again(self, name: str, num_rows: int, window: TensorWindow) -> Tensor:
        """Rows in float32, rounded to the model's dtype on the way."""
        path, inner = self._file_of[name]
        with safe_open(str(path), framework="pt") as file:
            return window.cut(file.get_slice(inner)).to(self.dtype).float()

    def reopened(self) -> Checkpoint:
        """Open the same files again, for tensors in the host's memory. The caller closes them."""
        return Checkpoint(self._folder, self.dtype, torch.device("cpu"))

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def finish(self) -> None:
        """Close the files.

        Raises:
            InvalidRequest: naming the first tensor that the model did not take.
        """
        self.close()
        self._ignore_further_tokens()
        if self._left:
            name = min(self._left)
            description = f"is unknown to this model family ({len(self._left)} such tensors)"
            raise InvalidRequest.field(name, "left over", description)


class StackedRows:
    """Implements `WeightRows` over weights that are stacked by outputs; each call reads what it
    returns."""

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        num_inputs: int,
        read: Callable[[str, int, TensorWindow], Tensor],
    ) -> None:
        """`read`: float32 rows of a weight, given its name, its number of rows, and which rows."""
        self._parts = parts
        self._read = read
        self.in_features = num_inputs
        self.out_features = sum(rows for _, rows in parts)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        rows = [torch.empty(0, self.in_features)]
        for name, num_rows, window in parts_of(self._parts, TensorWindow([(begin, end)])):
            assert window is not None
            rows.append(self._read(name, num_rows, window))
        return torch.cat(rows)


def _names_in(folder: Path, stored: Iterable[str]) -> dict[str, str]:
    """Name of a tensor -> its name in the files, which differ in a multimodal base."""
    stored = list(stored)
    config = folder / "config.json"
    if not config.exists() or not is_wrapper(read_json_object(config)):
        return {name: name for name in stored}
    names = plain_names(stored)
    logger.info(
        "the base is multimodal: its text model is served, and the weights of its other parts are "
        "ignored",
        extra={"num_text_tensors": len(names), "num_ignored_tensors": len(stored) - len(names)},
    )
    return names


def tensor_names(folder: Path) -> set[str]:
    """Names in the base's files; empty if there are none."""
    if not any(folder.glob("*.safetensors")):
        return set()
    return {name for path in _weight_files(folder) for name in _header(path)}


def published(folder: Path) -> tuple[int, bool]:
    """Bytes of a base's weights, and whether matrices are in half precision; reads headers only.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    num_bytes, dtypes = 0, set()
    for path in _weight_files(folder):
        num_bytes += path.stat().st_size
        dtypes |= {
            entry["dtype"]
            for name, entry in _header(path).items()
            if len(entry["shape"]) > 1 and not name.endswith(SCALE_SUFFIXES)
        }
    return num_bytes, dtypes <= HALF_DTYPES


def _header(path: Path) -> dict[str, Any]:
    """The tensors that a file describes, by name."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        refuse_pickled(folder)
        return [folder / "model.safetensors"]
    weight_map = read_json_object(index).get("weight_map")
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not names or any("/" in name or not name.endswith(".safetensors") for name in names):
        why = "must map tensors to names of shards; copy or download the base again"
        raise InvalidRequest.field(f"{index.name}:weight_map", weight_map, why)
    return [folder / name for name in sorted(names)]
