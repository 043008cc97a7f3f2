"""Programs: the kernel calls of a forward pass, recorded once and then run without Python.

A CPU's counterpart of CUDA graphs. A pass is recorded while it computes. Its tensors get memory
that stays, so that the recorded addresses remain valid. Whoever runs the program later writes new
inputs where the recorded pass read its own.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = torch.ops.aten.empty.memory_format
_FRESH = torch.ops.aten.lift_fresh.default
"""Called by `torch.tensor`, whose memory does not stay."""


class ProgramMemory:
    """Memory that the programs of a model share, since they run one after another.

    The first tensors that passes allocate share a buffer, then the second ones, and so on. Buffers
    have room for passes of `max_rows` rows.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._buffers: list[Tensor] = []
        self._num_rows = self._num_taken = 0

    @property
    def buffers(self) -> Sequence[Tensor]:
        """All memory that the last pass may have used."""
        return tuple(self._buffers)

    def begin(self, num_rows: int) -> None:
        """A pass of `num_rows` rows begins."""
        self._num_rows, self._num_taken = num_rows, 0

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised, `size`; its number of items is proportional to the number of rows."""
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        index, self._num_taken = self._num_taken, self._num_taken + 1
        if index == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[index]) < num_bytes:
            most = -(-num_bytes // self._num_rows) * self.max_rows
            self._buffers[index] = torch.empty(most, dtype=torch.uint8)
        return self._buffers[index][:num_bytes].view(dtype).view(*size)


class Program:
    """The calls of one pass, which read and write at the addresses of that pass."""

    def __init__(
        self, library: ctypes.CDLL, words: Sequence[int], buffers: Sequence[Tensor], result: Tensor
    ) -> None:
        self._run = library.lpx_run_program
        self._words = torch.tensor(words, dtype=torch.int64)
        self._arguments = self._words.data_ptr(), len(words)
        self._buffers = buffers
        self.result = result
        """Where each run leaves its result."""

    def run(self) -> None:
        """Call the kernels."""
        self._run(*self._arguments)


class Recorder(TorchDispatchMode):
    """Calls kernels and lists the calls. While it is entered, torch allocates in `memory`."""

    def __init__(self, library: ctypes.CDLL, memory: ProgramMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type here
        self._library = library
        self._memory = memory
        self._thread = threading.get_ident()
        self._words: list[int] = []
        self._is_complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would import its compiler at the first operator, only to skip it.
        That takes a second."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this instead of each of its operators."""
        kwargs = kwargs or {}
        if function is _EMPTY:
            return self._memory.take(args[0], kwargs["dtype"])
        result = function(*args, **kwargs)
        is_view = function.is_view and function is not _FRESH
        self._is_complete &= is_view and _share_memory(result, args[0])
        return result

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The kernel of this name, recorded."""
        kernel = getattr(self._library, name)
        number = self._library.lpx_kernel_number(name.encode())

        def call(*args: float | None) -> None:
            if threading.get_ident() == self._thread:  # other threads are not part of the pass
                self._words += [number, *map(_word, args, kernel.argtypes)]
                self._is_complete &= number >= 0
            kernel(*args)

        setattr(self, name, call)
        return call

    def program(self, result: Tensor) -> Program | None:
        """What was recorded; None if it is not all that the pass did."""
        if not self._is_complete:
            return None
        return Program(self._library, self._words, self._memory.buffers, result)


def _share_memory(result: Any, source: Any) -> bool:
    """Whether a result is a view of its source. Operators such as `reshape` may return a copy."""
    parts = [result] if isinstance(result, Tensor) else result
    address = source.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == address for part in parts)


def _word(argument: float | None, kind: type) -> int:
    if kind is ctypes.c_double:
        assert argument is not None
        bits: int = struct.unpack("<q", struct.pack("<d", argument))[0]
        return bits
    return int(argument or 0)
