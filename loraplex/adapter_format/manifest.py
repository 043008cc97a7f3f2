"""The core manifest: canonical JSON of everything that decoding an adapter depends on.

The sha256 of these bytes is the adapter's digest, its only identity. The tensor file is named by
its own sha256; the config is inside, canonical, so that two uploads that decode alike have one
digest whatever wrote them. Other files (README, tokenizer) belong to the version record, not here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.config import canonical_config, canonical_json
from loraplex.adapter_format.files import File
from loraplex.adapter_format.report import Report
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.adapter_format.strict_json import read_object
from loraplex.errors import DataLoss, InvalidAdapter

SCHEMA = "loraplex.adapter.v1"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Manifest:
    """A core manifest, read back."""

    files: tuple[File, ...]
    """Files that must be fetched by sha256 to decode, ordered by path."""
    config_bytes: bytes
    """Canonical adapter_config.json: write it next to the files and validate both again."""
    base_fingerprint: str
    max_rank: int
    num_modules: int


def core_manifest(report: Report, files: Sequence[File], base_fingerprint: str) -> bytes:
    """The manifest of a validated adapter.

    Args:
        report: of `validate`.
        files: all files of the adapter; those decoding does not need are left out.
        base_fingerprint: of the base it was validated against.
    """
    needed = sorted((file for file in files if file.path == TENSOR_FILE), key=lambda f: f.path)
    assert needed, "validation requires the tensor file"
    return canonical_json(
        {
            "schema": SCHEMA,
            "base_fingerprint": base_fingerprint,
            "config": canonical_config(report.config),
            "files": [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in needed],
            "max_rank": report.max_rank,
            "num_modules": report.num_modules,
        }
    )


def digest_of(manifest: bytes) -> str:
    """The adapter's identity: `sha256:` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(manifest).hexdigest()


def parse_manifest(raw: bytes) -> Manifest:
    """Read a manifest back.

    Raises:
        DataLoss: it is not a manifest of this schema.
    """
    try:
        value = read_object(raw, "manifest", MAX_MANIFEST_BYTES)
        if value["schema"] != SCHEMA:
            raise DataLoss(
                f"the manifest has schema {value['schema']!r}, and this build reads {SCHEMA}; use "
                "a newer one"
            )
        files = json.loads(json.dumps(value["files"]))
        return Manifest(
            files=tuple(File(str(f["path"]), int(f["size"]), str(f["sha256"])) for f in files),
            config_bytes=canonical_json(value["config"]),
            base_fingerprint=str(value["base_fingerprint"]),
            max_rank=int(str(value["max_rank"])),
            num_modules=int(str(value["num_modules"])),
        )
    except (InvalidAdapter, KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"manifest is damaged: {error}") from error
