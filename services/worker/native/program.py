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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex_services.worker.native.arithmetic import Arithmetic

_EMPTY = torch.ops.aten.empty.memory_format
_FRESH = torch.ops.aten.lift_fresh.default
"""Called by `torch.tensor`, whose memory does not stay."""
_RESHAPED = torch.ops.aten._unsafe_view.default
"""A view that torch makes of a copy."""


class ProgramMemory:
    """Buffers that the programs of a model share, since they run one after another.

    Within a pass, a tensor takes over the buffer of one that is no longer referenced. A model
    therefore needs the memory of about one layer. Buffers are large enough for passes of
    `max_rows` rows.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._buffers: list[Tensor] = []
        """uint8 `[max_rows, bytes of a row]` each."""
        self._users: list[StorageWeakRef | None] = []
        """The storage that the pass uses each buffer for."""
        self._num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, num_rows: int) -> None:
        """A pass of `num_rows` rows begins, and nothing of earlier passes is needed any more."""
        self._num_rows = num_rows
        self._users = [None] * len(self._buffers)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised, `size`; its number of items is proportional to the number of rows."""
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        index = self._free_buffer(-(-num_bytes // self._num_rows))
        # Made of an array, a tensor and its views have a storage of their own, whose end is seen.
        own = torch.from_numpy(self._buffers[index].view(-1).numpy()[:num_bytes])
        self._users[index] = StorageWeakRef(own.untyped_storage())
        return own.view(dtype).view(*size)

    def _free_buffer(self, row_bytes: int) -> int:
        """The index of the smallest unused buffer that is large enough; a new one if none is."""
        free = [
            (buffer.shape[1], index)
            for index, (buffer, user) in enumerate(zip(self._buffers, self._users, strict=True))
            if buffer.shape[1] >= row_bytes and (user is None or user.expired())
        ]
        if free:
            return min(free)[1]
        self._buffers.append(torch.empty(self.max_rows, row_bytes, dtype=torch.uint8))
        self._users.append(None)
        return len(self._buffers) - 1


class Program:
    """The calls of one pass, which read and write at the addresses of that pass."""

    def __init__(
        self, library: ctypes.CDLL, words: Sequence[int], memory: object, result: Tensor
    ) -> None:
        """`memory`: what the addresses of the words point into."""
        self._run = library.lpx_run_program
        self._words = torch.tensor(words, dtype=torch.int64)
        self._arguments = self._words.data_ptr(), len(words)
        self._memory = memory
        self.result = result
        """Where each run leaves its result."""

    def run(self) -> None:
        """Call the kernels."""
        self._run(*self._arguments)


class Recorder(TorchDispatchMode):
    """Calls kernels and lists the calls. While it is entered, torch allocates in `memory`, and the
    kernel of `arithmetic.py` computes for it where it can."""

    def __init__(self, library: ctypes.CDLL, memory: ProgramMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type here
        self._library = library
        self._memory = memory
        self._arithmetic = Arithmetic(self, memory.take)
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
        computed = self._arithmetic.compute(function, args, kwargs)
        if computed is not None:
            return computed
        with self:  # which operators such as `flatten` are made of
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = function(*args, **kwargs)
        is_view = function is _RESHAPED or (function.is_view and function is not _FRESH)
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
        memory = self._memory, self._arithmetic.constants
        return Program(self._library, self._words, memory, result)


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
