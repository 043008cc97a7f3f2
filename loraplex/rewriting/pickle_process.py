"""The process that reads a pickled `adapter_model.bin` from stdin and writes safetensors to stdout.

A pickle names functions, and reading it calls them. torch's weights-only loading refuses all but
those that rebuild tensors. In case that ever fails, this process cannot open files or sockets, has
a memory limit and no credentials, and is killed if it takes too long.

    python -m loraplex.rewriting.pickle_process [F16|BF16|F32] < PICKLE > SAFETENSORS
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import struct
import sys
from pickle import UnpicklingError
from typing import BinaryIO

import torch

from loraplex.adapter_format.files import PICKLE_FILE
from loraplex.adapter_format.safetensors_header import encode_header
from loraplex.rewriting.child import limit_memory, refuse

SPARE_MEMORY_BYTES = 1 << 30
_NUM_STANDARD_FILES = 3
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def main() -> None:
    """Convert one file, from stdin to stdout."""
    dtype = _BY_NAME[sys.argv[1]] if len(sys.argv) > 1 else None
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    file_bytes = os.fstat(source.fileno()).st_size
    import_all()
    confine(memory_bytes=3 * file_bytes + SPARE_MEMORY_BYTES)
    try:
        _write(_cast(_load(source, file_bytes), dtype), sink)
    except MemoryError:
        refuse(PICKLE_FILE, file_bytes, "needs more memory to read than a file of its size may")


def import_all() -> None:
    """Make torch do beforehand everything for which it opens files: imports and the detection of
    the processor."""
    for dtype in (*_DTYPES, torch.float64):
        for other in _DTYPES:
            torch.ones(8, 64, dtype=dtype).t().to(other).contiguous()
    for is_new in (True, False):
        own = io.BytesIO()
        torch.save({"a": torch.ones(1)}, own, _use_new_zipfile_serialization=is_new)
        own.seek(0)
        torch.load(own, map_location="cpu", weights_only=True)


def confine(memory_bytes: int) -> None:
    """Give up the rights to open files and sockets and to allocate more than `memory_bytes` of new
    memory."""
    limit_memory(memory_bytes)
    limits = {resource.RLIMIT_NOFILE: _NUM_STANDARD_FILES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS lacks some of them.
            resource.setrlimit(limit, (value, value))


def _load(source: BinaryIO, file_bytes: int) -> dict[str, torch.Tensor]:
    """The tensors by name."""
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        name = _GLOBAL.search(str(error))
        if name is None:
            refuse(PICKLE_FILE, "", "is damaged, or holds more than tensors; no code in it was run")
        description = "is code that reading the file would run, so it was not read; do not trust it"
        refuse(PICKLE_FILE, name[1], description)
    except (
        *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
        *(RuntimeError, TypeError, ValueError, struct.error),
    ) as error:
        if "allocate" in str(error):
            raise MemoryError from None
        refuse(PICKLE_FILE, type(error).__name__, "is damaged: torch cannot read it")
    if not isinstance(loaded, dict) or not loaded:
        refuse(PICKLE_FILE, type(loaded).__name__, "must map names to tensors; save it with PEFT")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            refuse(f"{PICKLE_FILE}:{name}", type(tensor).__name__, "must be a tensor with a name")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            refuse(f"{PICKLE_FILE}:{name}", str(tensor.layout), "must be a dense tensor")
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
    if tensor_bytes > 2 * file_bytes:
        description = f"are claimed by a file of {file_bytes}; it is damaged"
        refuse(PICKLE_FILE, f"{tensor_bytes} bytes of tensors", description)
    return loaded


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors in the given dtype, or in their own if adapters may have it."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            refuse(f"{PICKLE_FILE}:{name}", str(tensor.dtype), "must be a floating-point tensor")
        if dtype is None and tensor.dtype not in _DTYPES:
            description = "is not a dtype of adapters; add --dtype float32"
            refuse(f"{PICKLE_FILE}:{name}", str(tensor.dtype), description)
    return {name: tensor.detach().to(dtype or tensor.dtype) for name, tensor in tensors.items()}


def _write(tensors: dict[str, torch.Tensor], sink: BinaryIO) -> None:
    """One safetensors file, tensor by tensor."""
    entries = sorted(tensors.items())
    sink.write(encode_header((name, _DTYPES[t.dtype], t.shape) for name, t in entries))
    for _, tensor in entries:
        flat = tensor.contiguous().reshape(-1)
        sink.write(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    sink.flush()


if __name__ == "__main__":
    main()
