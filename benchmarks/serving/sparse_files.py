"""Files of adapters that are as long as real ones and take little space on a disk.

An adapter of a 7B base has 80 MB, so thousands of them fill a disk. Those made here are zero except
for some pages, which differ between adapters, and every copy of them has holes for the other pages.
A reader handles as many bytes as with a real adapter, but few of them come from the disk.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from benchmarks.llama import Shape, write_hollow_adapter
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex_services.common.objects.file import FileStore
from loraplex_services.common.objects.store import After

PAGE_BYTES = 4096
NUM_FILLED = 16
"""Pages of an adapter that are not zero."""


class SparseStore(FileStore):
    """A store in a folder. Objects are named by their bytes, and have holes for their zeros."""

    async def put(self, key: str, data: bytes, *, after: After = None) -> None:
        """One that is there stays."""
        path = self._path(key)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_with_holes(path, data)


def write_with_holes(path: Path, data: bytes) -> None:
    """A new file, in which pages of zeros take no space."""
    whole = len(data) // PAGE_BYTES
    pages = np.frombuffer(data, np.uint64, whole * PAGE_BYTES // 8).reshape(whole, PAGE_BYTES // 8)
    filled = np.append(pages.any(axis=1), True)  # the rest of the file is not a whole page
    edges = np.flatnonzero(np.diff(filled, prepend=False, append=False)) * PAGE_BYTES
    with path.open("xb", buffering=0) as file:
        file.truncate(len(data))
        for begin, end in edges.reshape(-1, 2):
            os.pwrite(file.fileno(), data[begin:end], int(begin))


def dig_holes(path: Path) -> None:
    """Replace a file by one that has holes for its zeros."""
    scratch = path.with_name(secrets.token_hex(8))
    write_with_holes(scratch, path.read_bytes())
    os.replace(scratch, path)


def write_sparse_adapter(shape: Shape, folder: Path, rank: int, seed: int) -> Path:
    """An adapter on all linears in bfloat16, as long as a real one."""
    first = write_hollow_adapter(shape, folder, rank, "BF16")
    rng = np.random.default_rng(seed)
    with (folder / TENSOR_FILE).open("r+b") as file:
        pages = np.arange(-(-first // PAGE_BYTES), os.fstat(file.fileno()).st_size // PAGE_BYTES)
        for page in rng.choice(pages, NUM_FILLED, replace=False):
            values = rng.standard_normal(PAGE_BYTES // 2, np.float32) * 0.02
            file.seek(int(page) * PAGE_BYTES)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return folder
