"""Decides by name and size which files an adapter may contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.config import CONFIG_FILE, MAX_CONFIG_BYTES
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.safetensors_header import TENSOR_FILE

MiB = 1024 * 1024
MAX_TENSOR_FILE_BYTES = 64 * 1024 * MiB

MAX_BYTES: dict[str, int] = {
    CONFIG_FILE: MAX_CONFIG_BYTES,
    TENSOR_FILE: MAX_TENSOR_FILE_BYTES,
    "LICENSE": MiB,
    "README.md": MiB,
    "added_tokens.json": 8 * MiB,
    "chat_template.jinja": MiB,
    "chat_template.json": MiB,
    "generation_config.json": MiB,
    "merges.txt": 16 * MiB,
    "special_tokens_map.json": MiB,
    "tokenizer.json": 64 * MiB,
    "tokenizer.model": 16 * MiB,
    "tokenizer_config.json": 8 * MiB,
    "vocab.json": 32 * MiB,
}
"""Every allowed file with its size limit in bytes."""

IGNORED = frozenset({
    ".DS_Store", ".cache", ".git", ".gitattributes", ".gitignore", ".huggingface",
    ".ipynb_checkpoints", "model.sig",
})  # fmt: skip
"""Files that `folder` leaves out silently: a signature is not part of what it signs."""

PICKLE_FILE = "adapter_model.bin"
"""The file that PEFT wrote before safetensors."""
MAX_PICKLE_BYTES = 8 * 1024 * MiB
"""Largest size in bytes of such a file: the process that converts it holds it in memory."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".whl")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class File:
    """One file of an adapter."""

    path: str
    """Name relative to the adapter's folder."""
    size: int
    """In bytes."""
    sha256: str
    """64 hex digits."""


def name_problem(name: str) -> str | None:
    """Why a file of this name is refused, with the way out; None if it is allowed."""
    if name in MAX_BYTES:
        return None
    if name == PICKLE_FILE:
        return (
            "is a pickle, which can run code; make safetensors of it with "
            "'registry convert DIR OUT --to safetensors', or add --convert to 'registry upload'"
        )
    lower = name.lower()
    if lower.endswith(_PICKLES):
        return "may hold a pickle, which can run code; remove it, and save weights as safetensors"
    if lower.endswith(_ARCHIVES):
        return "is an archive; unpack it and upload the files"
    if name.endswith((f"/{CONFIG_FILE}", f"/{TENSOR_FILE}")):
        folder = name.rpartition("/")[0]
        return f"is in a sub-folder (PEFT does that for named adapters); upload {folder!r} itself"
    return f"is not a file of an adapter; remove it (allowed are {', '.join(sorted(MAX_BYTES))})"


def size_problem(name: str, num_bytes: int) -> str | None:
    """Why a file of an allowed name, or a pickle, is refused for its size; None if it is not."""
    most = MAX_PICKLE_BYTES if name == PICKLE_FILE else MAX_BYTES[name]
    return None if 0 < num_bytes <= most else f"must have 1 to {most} bytes"


def check_files(files: Sequence[File], findings: Findings) -> None:
    """Refuse unusual names, duplicates, wrong sizes and digests, and a missing config or tensor
    file."""
    seen: set[str] = set()
    for file in files:
        problem = name_problem(file.path)
        if problem:
            findings.refuse(file.path, file.path, problem)
        elif file.path in seen:
            findings.refuse(file.path, file.path, "is listed twice; list every file once")
        elif limit := size_problem(file.path, file.size):
            findings.refuse(file.path, f"{file.size} bytes", limit)
        elif not _SHA256.fullmatch(file.sha256):
            findings.refuse(f"{file.path}:sha256", file.sha256, "must be 64 lower-case hex digits")
        seen.add(file.path)
    for name in (CONFIG_FILE, TENSOR_FILE):
        if name not in seen:
            findings.refuse(name, "missing", "is missing; save the adapter with PEFT")
