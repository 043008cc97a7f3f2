"""Selects which files of a repository or a prefix belong to the adapter, and writes them safely."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE
from loraplex.adapter_format.files import IGNORED, MAX_BYTES, MAX_PICKLE_BYTES, PICKLE_FILE
from loraplex.adapter_format.sentence_folder import MODULES_FILE, POOLING_FILE
from loraplex.client.progress import Progress
from loraplex.errors import DataLoss, InvalidAdapter, Violation
from loraplex.signature_bundle import SIGNATURE_FILE

_MAX_NAMED = 8
_BESIDE = {SIGNATURE_FILE: 1 << 20, MODULES_FILE: 1 << 16, POOLING_FILE: 1 << 16}
"""Files that do not belong to the adapter, but that an upload reads."""
_LIMITS = {**MAX_BYTES, **_BESIDE, PICKLE_FILE: MAX_PICKLE_BYTES}


def select(sizes: Mapping[str, int], *, pickled: bool) -> tuple[list[str], tuple[Violation, ...]]:
    """Select the files of an adapter; returns their names and warnings about the others.

    Args:
        sizes: bytes of each file there, by its path.
        pickled: whether `adapter_model.bin` may take the place of the safetensors.

    Raises:
        InvalidAdapter: config or weights are missing, or a file is too large.
    """
    weights = TENSOR_FILE if TENSOR_FILE in sizes else PICKLE_FILE
    unwanted = {TENSOR_FILE, PICKLE_FILE} - {weights}
    taken = [name for name in sorted(sizes) if name in _LIMITS and name not in unwanted]
    violations = []
    if weights not in sizes:
        hint = "is needed; is this the place of a LoRA adapter?"
        violations.append(Violation.of(TENSOR_FILE, "missing", hint))
    elif weights == PICKLE_FILE and not pickled:
        hint = "is a pickle, which can run code; add --convert to make safetensors of it"
        violations.append(Violation.of(PICKLE_FILE, PICKLE_FILE, hint))
    if CONFIG_FILE not in sizes:
        hint = "is needed; is this the place of a LoRA adapter?"
        violations.append(Violation.of(CONFIG_FILE, "missing", hint))
    for name in taken:
        if sizes[name] > _LIMITS[name]:
            hint = f"must have at most {_LIMITS[name]} bytes"
            violations.append(Violation.of(name, f"{sizes[name]} bytes", hint))
    if violations:
        raise InvalidAdapter.of(violations)
    return taken, _left_out(set(sizes) - set(taken))


def _left_out(names: Iterable[str]) -> tuple[Violation, ...]:
    left = sorted(name for name in names if name.partition("/")[0] not in IGNORED)
    if not left:
        return ()
    more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
    description = "do not belong to the adapter and are left out"
    return (Violation.of("files", ", ".join(left[:_MAX_NAMED]) + more, description),)


def write_bounded(
    name: str, chunks: Iterable[bytes], target: Path, size: int, progress: Progress
) -> str:
    """Write a file that must have `size` bytes; returns its sha256.

    Raises:
        DataLoss: it has more or fewer.
    """
    digest = hashlib.sha256()
    done_bytes = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as sink:
        for chunk in chunks:
            done_bytes += len(chunk)
            if done_bytes > size:
                raise DataLoss(f"{name}: more than the {size} bytes that were announced")
            digest.update(chunk)
            sink.write(chunk)
            progress(f"fetch {name}", done_bytes, size)
    if done_bytes != size:
        raise DataLoss(f"{name}: {done_bytes} of {size} bytes arrived; try again")
    return digest.hexdigest()
