"""Reads an adapter's folder from disk, and says which files are used and why others are refused."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapter_format.config import CONFIG_FILE
from loraplex.adapter_format.files import (
    IGNORED,
    MAX_BYTES,
    PICKLE_FILE,
    File,
    name_problem,
    size_problem,
)
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.leftovers import HARMLESS, file_left_out, folder_left_out
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, read_prefix
from loraplex.adapter_format.sentence_folder import check_pooling
from loraplex.adapter_format.serving_fields import GENERATION_FILE, complete_config
from loraplex.errors import InvalidAdapter, InvalidRequest, Violation

MAX_FOLDERS_NAMED = 5
"""Number of folders among which an error lets the user choose."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The files of a PEFT folder: the input of `validate`."""

    tensor_path: Path
    config_bytes: bytes
    """adapter_config.json, as `read_config` returns it."""
    header_prefix: bytes
    tensor_file_size: int
    files: tuple[File, ...]
    """Ordered by path."""


def read_folder(path: Path) -> AdapterFolder:
    """Read a folder and hash its files.

    Raises:
        InvalidRequest: there is no such folder.
        InvalidAdapter: a file is of a refused kind or size, or config or tensors are missing.
    """
    return read_files({name: path / name for name in file_names(path)})


def read_files(locations: Mapping[str, Path]) -> AdapterFolder:
    """Read and hash an adapter's files, among them config and tensors, wherever each of them is.

    Args:
        locations: where each file is, by its name within the adapter. None is larger than allowed.
    """
    tensors = locations[TENSOR_FILE]
    return AdapterFolder(
        tensor_path=tensors,
        config_bytes=read_config(locations),
        header_prefix=read_prefix(tensors),
        tensor_file_size=tensors.stat().st_size,
        files=tuple(_hash_file(locations[name], name) for name in sorted(locations)),
    )


def read_config(locations: Mapping[str, Path]) -> bytes:
    """adapter_config.json with what other files say of decoding: see `serving_fields`.

    Raises:
        InvalidAdapter: they contradict it, or are damaged.
    """
    generation = locations.get(GENERATION_FILE)
    return complete_config(
        _read(locations[CONFIG_FILE], CONFIG_FILE),
        generation_config=None if generation is None else _read(generation, GENERATION_FILE),
    )


def _read(path: Path, name: str) -> bytes:
    """The content of a file, at most one byte more than is allowed: it may have grown since its
    size was checked."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES[name] + 1)


def file_names(path: Path, tensor_file: str = TENSOR_FILE) -> tuple[str, ...]:
    """The adapter's files in a folder, sorted.

    Args:
        tensor_file: what its weights are in: `adapter_model.bin` for a folder to be converted.

    Raises:
        InvalidRequest: there is no such folder.
        InvalidAdapter: something in it is refused, or config or tensors are missing.
    """
    return _look(path, tensor_file)[0]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The entries of a folder that are not part of its adapter."""

    names: tuple[str, ...]
    """Training state, pictures and logs, which need no action."""
    warnings: tuple[Violation, ...]
    """Other adapters."""


def left_out(path: Path) -> LeftOut:
    """The entries of a folder that are not part of the adapter. Raises as `file_names` does."""
    return _look(path, TENSOR_FILE)[1]


def _look(path: Path, tensor_file: str) -> tuple[tuple[str, ...], LeftOut]:
    if not path.is_dir():
        raise InvalidRequest.field("DIR", str(path), "is not a folder; give an adapter's folder")
    findings = Findings()
    entries = [e for e in sorted(os.scandir(path), key=lambda e: e.name) if e.name not in IGNORED]
    present = {entry.name for entry in entries}
    missing = [name for name in (CONFIG_FILE, tensor_file) if name not in present]
    inner = [entry.name for entry in entries if _holds_adapter(entry)]
    if len(missing) == 2:
        raise InvalidAdapter.field("DIR", str(path), _why_none(path, inner))
    names, harmless = [], []
    for entry in entries:
        reason = _reason_to_leave(entry, is_whole=not missing)
        problem = None if reason else _entry_problem(entry, tensor_file)
        if reason and reason in HARMLESS:
            harmless.append(entry.name)
        elif reason:
            findings.warn(entry.name, entry.name, reason)
        elif problem:
            findings.refuse(entry.name, entry.name, problem)
        elif limit := size_problem(entry.name, num_bytes := entry.stat().st_size):
            findings.refuse(entry.name, f"{num_bytes} bytes", limit)
        else:
            names.append(entry.name)
    for name in missing:
        if name == TENSOR_FILE and PICKLE_FILE in present:
            continue  # Refused above, with the command that makes the missing file of it.
        findings.refuse(name, "missing", "is missing; save the adapter with PEFT's save_pretrained")
    if not missing and CONFIG_FILE in names:  # Not through a link, nor from a pipe.
        check_pooling(path, _read(path / CONFIG_FILE, CONFIG_FILE), findings)
    findings.raise_if_refused()
    return tuple(names), LeftOut(tuple(harmless), tuple(findings.warnings))


def _why_none(path: Path, inner: list[str]) -> str:
    """Why a folder is not an adapter, and where there is one."""
    if not inner:
        return (
            f"holds no adapter: {CONFIG_FILE} and {TENSOR_FILE} are missing; save it with PEFT's "
            "save_pretrained"
        )
    if checkpoints := [name for name in inner if name.startswith("checkpoint-")]:
        newest = path / _newest(checkpoints)
        return f"holds no adapter itself; its latest checkpoint is {newest}: give that folder"
    folders = " or ".join(str(path / name) for name in inner[:MAX_FOLDERS_NAMED])
    return (
        "holds no adapter itself, but was saved with other adapter names than 'default': give "
        f"{folders}"
    )


def _holds_adapter(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and (Path(entry.path) / CONFIG_FILE).exists()


def _newest(names: list[str]) -> str:
    """The checkpoint with the most steps."""
    return max(names, key=lambda name: (len(name), name))


def _reason_to_leave(entry: os.DirEntry[str], *, is_whole: bool) -> str | None:
    """Why an entry is not uploaded; None if it is uploaded or refused."""
    if entry.is_symlink():
        is_other = hub_blob(Path(entry.path)) is not None and name_problem(entry.name) is not None
        return file_left_out(entry.name) if is_other else None
    if entry.is_dir(follow_symlinks=False):
        if is_whole and _holds_adapter(entry) and not folder_left_out(entry.name):
            return "holds another adapter, which is left out; to publish it, upload that folder"
        return folder_left_out(entry.name)
    is_file = stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
    if not is_file or name_problem(entry.name) is None:
        return None
    return file_left_out(entry.name)


def _entry_problem(entry: os.DirEntry[str], tensor_file: str) -> str | None:
    problem = None if entry.name == tensor_file else name_problem(entry.name)
    if entry.is_symlink():
        if hub_blob(Path(entry.path)) is not None:
            return problem
        return "is a link; copy the file itself"
    if entry.is_dir(follow_symlinks=False):
        if _holds_adapter(entry):
            return f"holds an adapter saved under another name than 'default'; use {entry.path}"
        return "is a folder; an adapter is a flat folder"
    if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
        return "is not a regular file"
    return problem


def hub_blob(link: Path) -> Path | None:
    """The file behind a link that a hub cache makes, from a snapshot to its repository's blobs;
    None for any other path. A folder `blobs` that is itself a link may lead to files that are not
    the repository's."""
    snapshots = link.parent.parent
    target = Path(os.path.realpath(link))  # which a loop of links does not make fail
    is_blob = (
        snapshots.name == "snapshots"
        and target.parent == snapshots.parent.resolve() / "blobs"
        and target.is_file()
    )
    return target if is_blob else None


def _hash_file(path: Path, name: str) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return File(name, file.tell(), digest.hexdigest())
