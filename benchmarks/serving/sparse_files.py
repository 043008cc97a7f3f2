"""Files of adapters that are as long as real ones and take little space on a disk.

An adapter of a 7B base has 80 MB, so thousands of them fill a disk. Those made here are zero except
for some pages, which differ between adapters, and every copy of them has holes for the other pages.
Whoever reads them handles as many bytes as those of a real adapter, but few come from the disk.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.llama import ALL_SEVEN, ATTENTION, Shape, write_adapter_config
from loraplex_services.common.objects.file import FileStore

PAGE_BYTES = 4096
BFLOAT16_BYTES = 2
NUM_FILLED = 16
"""Pages of an adapter that are not zero."""


class SparseStore(FileStore):
    """A store in a folder whose objects have holes for their zeros."""

    def _write_temporary(self, data: bytes) -> Path:
        with self._temporary_path() as path:
            write_with_holes(path, data)
        return path


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
    folder.mkdir(parents=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for layer in range(shape.num_layers):
        for name in ALL_SEVEN:
            num_inputs, num_outputs = shape.linears[name]
            block = "self_attn" if name in ATTENTION else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            for half, size in (("A", [rank, num_inputs]), ("B", [num_outputs, rank])):
                begin, end = end, end + BFLOAT16_BYTES * size[0] * size[1]
                tensor = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
                header[f"{module}.lora_{half}.weight"] = tensor
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    rng = np.random.default_rng(seed)
    with (folder / "adapter_model.safetensors").open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for page in rng.choice(end // PAGE_BYTES, NUM_FILLED, replace=False):
            values = rng.standard_normal(PAGE_BYTES // BFLOAT16_BYTES, np.float32) * 0.02
            file.seek(8 + len(text) + int(page) * PAGE_BYTES)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    write_adapter_config(folder, shape, rank, ALL_SEVEN)
    return folder
