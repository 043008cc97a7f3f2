"""Digests of a base's files, by which ranks check that all of them have the same base."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

SAMPLE_BYTES = 4096
_LENGTH_BYTES = 8


def config_digest(folder: Path) -> str:
    """The digest of config.json."""
    return _short(hashlib.sha256((folder / "config.json").read_bytes()))


def weights_digest(folder: Path) -> str:
    """The digest of the names, shapes and types of all tensors, and of bytes at the beginning, in
    the middle and at the end of each. Other weights of the same shapes differ there. Reading all
    bytes would take as long as loading the base once more.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        _add(digest, path)
    return _short(digest)


def _add(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))
        digest.update(header)
        data_begin = file.tell()
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            last = max(begin, end - SAMPLE_BYTES)
            for offset in (begin, (begin + last) // 2, last):
                num_bytes = min(SAMPLE_BYTES, end - offset)
                digest.update(os.pread(file.fileno(), num_bytes, data_begin + offset))


def _short(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]
