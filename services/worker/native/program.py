"""Programs: the kernel calls of a forward pass, recorded once and then run without Python.

A CPU's counterpart of CUDA graphs. A pass is recorded twice, with few rows and with many, and no
kernel is called meanwhile. Each argument of a call must be equal in both passes or proportional to
the number of rows, so the program can run with any number of rows up to the larger one. Its tensors
get memory that stays, so that the recorded addresses remain valid. Whoever runs the program writes
new inputs where the recorded passes read theirs.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex_services.worker.native.arithmetic import Arithmetic

FEW_ROWS = 2
"""Rows of the smaller pass. With a single row, some strides would look like zero."""
Words = npt.NDArray[np.int64]
"""The calls of a pass, as `native/src/program.cpp` reads them."""
_EMPTY = torch.ops.aten.empty.memory_format
_FRESH = torch.ops.aten.lift_fresh.default
"""Called by `torch.tensor`, whose memory does not stay."""
_RESHAPED = torch.ops.aten._unsafe_view.default
"""A view that torch makes of a copy."""


class ProgramMemory:
    """Buffers that the programs of a model share, since they run one after another.

    Within a pass, a tensor takes over the buffer of one of the same width that is no longer
    referenced. A model therefore needs the memory of about one layer. Buffers are large enough for
    passes of `max_rows` rows. Linux provides their pages when they are first written.
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
        """The index of the first unused buffer of this width; a new one if there is none. The
        first, so that passes of any number of rows use the same buffers."""
        for index, (buffer, user) in enumerate(zip(self._buffers, self._users, strict=True)):
            if buffer.shape[1] == row_bytes and (user is None or user.expired()):
                return index
        self._buffers.append(torch.empty(self.max_rows, row_bytes, dtype=torch.uint8))
        self._users.append(None)
        return len(self._buffers) - 1


class CannotRecord(Exception):
    """A pass does something that programs cannot do."""


class Program:
    """The calls of one pass, for any number of rows up to `memory.max_rows`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        words: tuple[Words, Words],
        memory: tuple[ProgramMemory, object],
        result: Tensor,
    ) -> None:
        """
        Args:
            words: of passes with FEW_ROWS and with `memory.max_rows` rows.
            memory: what the addresses among them point into.
            result: of the larger pass.

        Raises:
            CannotRecord: the passes do not make the same calls, or an argument depends on the
                number of rows in another way.
        """
        self._run = library.lpx_run_program
        self._fixed, self._by_row = _split(words, memory[0].max_rows)
        self._words = np.empty_like(self._fixed)
        self._memory = memory
        self._result = result

    def run(self, num_rows: int) -> Tensor:
        """Call the kernels. Returns the rows of the result, which the next run overwrites."""
        np.multiply(self._by_row, num_rows, out=self._words)
        self._words += self._fixed
        self._run(self._words.ctypes.data, len(self._words))
        return self._result[:num_rows]


def _split(words: tuple[Words, Words], max_rows: int) -> tuple[Words, Words]:
    """The part of each word that is the same with any number of rows, and the part for each row,
    of which one is zero."""
    small, large = words
    if small.shape != large.shape:
        raise CannotRecord("a pass makes other calls with more rows")
    is_fixed = small == large
    by_row = np.where(is_fixed, 0, small // FEW_ROWS)
    if not (is_fixed | ((by_row * FEW_ROWS == small) & (by_row * max_rows == large))).all():
        raise CannotRecord("an argument is not proportional to the number of rows")
    return np.where(is_fixed, small, 0), by_row


class Recorder(TorchDispatchMode):
    """Lists calls of kernels instead of making them. While it is entered, torch allocates in
    `memory`, and a kernel stands for the operators that `arithmetic.py` knows."""

    def __init__(self, library: ctypes.CDLL, memory: ProgramMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type here
        self._library = library
        self._memory = memory
        self._arithmetic = Arithmetic(self, memory.take)
        self._thread = threading.get_ident()
        self._words: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would import its compiler at the first operator, only to skip it.
        That takes a second."""
        return False

    def record(self, compute: Callable[[int], Tensor]) -> Program:
        """See `Native.record`.

        Raises:
            CannotRecord: no program does the same.
        """
        if self._memory.max_rows <= FEW_ROWS:
            raise CannotRecord("both passes would have the same number of rows")
        small, _ = self._pass(compute, FEW_ROWS)
        large, result = self._pass(compute, self._memory.max_rows)
        memory = self._memory, self._arithmetic.constants
        return Program(self._library, (small, large), memory, result)

    def _pass(self, compute: Callable[[int], Tensor], num_rows: int) -> tuple[Words, Tensor]:
        self._memory.begin(num_rows)
        self._words = []
        with self:
            result = compute(num_rows)
        return np.array(self._words, dtype=np.int64), result

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this instead of each of its operators."""
        kwargs = kwargs or {}
        if function is _EMPTY:
            return self._memory.take(args[0], kwargs["dtype"])
        recorded = self._arithmetic.compute(function, args, kwargs)
        if recorded is not None:
            return recorded
        with self:  # which operators such as `flatten` are made of
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if function is not _RESHAPED and (not function.is_view or function is _FRESH):
            raise CannotRecord(f"{function} computes in torch")
        result = function(*args, **kwargs)
        if not _share_memory(result, args[0]):
            raise CannotRecord(f"{function} copies")
        return result

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The kernel of this name, recorded."""
        kernel = getattr(self._library, name)
        number = self._library.lpx_kernel_number(name.encode())

        def call(*args: float | None) -> None:
            if threading.get_ident() != self._thread:  # other threads are not part of the pass
                kernel(*args)
            elif number < 0:
                raise CannotRecord(f"programs do not call {name}")
            else:
                self._words += [number, *map(_word, args, kernel.argtypes)]

        setattr(self, name, call)
        return call


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
