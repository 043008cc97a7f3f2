"""Reads and writes adapters as OCI image layouts, so that any OCI tool can transfer them.

    oci-layout              {"imageLayoutVersion": "1.0.0"}
    index.json              one manifest
    blobs/sha256/<hex>      manifest, config and the adapter's files, each a layer

`modelpack` follows the CNCF ModelPack specification; `oci` is a plain artifact as ORAS writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.api.registry import AdapterVersion
from loraplex.client.sent_files import LocalFile
from loraplex.errors import DataLoss, InvalidRequest

MODELPACK, OCI = "modelpack", "oci"
MARKER = "oci-layout"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MAX_DOCUMENT_BYTES = 4 << 20

_MODEL = "application/vnd.cncf.model"
_EMPTY = ("application/vnd.oci.empty.v1+json", b"{}")
_ARTIFACT_TYPES = {
    MODELPACK: f"{_MODEL}.manifest.v1+json",
    OCI: "application/vnd.loraplex.adapter.v1",
}
_FILEPATH = "org.cncf.model.filepath"
_TITLE = "org.opencontainers.image.title"
_REF_NAME = "org.opencontainers.image.ref.name"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


def is_layout(folder: Path) -> bool:
    """Whether a folder is an OCI image layout."""
    return (folder / MARKER).is_file()


def make_layout(folder: Path, version: AdapterVersion, form: str) -> str:
    """Turn a folder with the files of a version into a layout; returns the manifest's digest.

    Args:
        form: "modelpack" or "oci".
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = []
    for file in version.files:
        os.replace(folder / file.path, blobs / file.sha256)
        layers.append(
            {
                "mediaType": _layer_type(file.path, form),
                "digest": f"sha256:{file.sha256}",
                "size": file.size_bytes,
                "annotations": {_TITLE: file.path, _FILEPATH: file.path},
            }
        )
    config_type, config = _EMPTY if form == OCI else _model_config(version)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _ARTIFACT_TYPES[form],
        "config": _stored(blobs, config_type, config),
        "layers": layers,
        "annotations": _annotations(version),
    }
    entry = _stored(blobs, MANIFEST_TYPE, _json(manifest))
    entry |= {
        "artifactType": _ARTIFACT_TYPES[form],
        "annotations": {_REF_NAME: f"{version.name}-v{version.version}"},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    (folder / "index.json").write_bytes(_json(index))
    (folder / MARKER).write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return str(entry["digest"])


def layout_files(folder: Path) -> list[LocalFile]:
    """The adapter's files in a layout of one manifest with one uncompressed layer for each file.

    Raises:
        InvalidRequest: it is another kind of layout.
        DataLoss: a blob is missing or does not match its digest.
    """
    if not _is_inside(folder, Path("index.json")):
        raise InvalidRequest.field("index.json", str(folder), "is missing, or a link")
    index = _read(folder / "index.json", "index.json")
    manifests = _objects(index, "manifests")
    if len(manifests) != 1:
        description = "must name one manifest; copy the wanted one into a layout of its own"
        raise InvalidRequest.field("index.json:manifests", f"{len(manifests)} entries", description)
    digest = manifests[0].get("digest", "")
    manifest = _read(_blob(folder, digest), "manifest", digest)
    return [_layer_file(folder, layer) for layer in _objects(manifest, "layers")]


def _layer_file(folder: Path, layer: Mapping[str, Any]) -> LocalFile:
    annotations = layer.get("annotations")
    named = annotations if isinstance(annotations, dict) else {}
    path = named.get(_FILEPATH) or named.get(_TITLE)
    media_type = str(layer.get("mediaType", ""))
    if not isinstance(path, str) or not path:
        description = f"has no annotation {_FILEPATH} or {_TITLE}, so its file has no name"
        raise InvalidRequest.field("manifest:layers", media_type, description)
    if ".tar" in media_type or "+" in media_type.removesuffix("+json"):
        description = "is archived or compressed; only raw layers, one for each file, are read"
        raise InvalidRequest.field(f"manifest:{path}", media_type, description)
    blob = _blob(folder, layer.get("digest", ""))
    size = blob.stat().st_size
    if size != layer.get("size"):
        raise DataLoss(
            f"{path}: its blob has {size} bytes, but the manifest says {layer.get('size')}"
        )
    return LocalFile(path, blob, size, blob.name)


def _blob(folder: Path, digest: object) -> Path:
    """Path of a blob. Raises InvalidRequest for a malformed digest, DataLoss for a blob that is
    missing or behind a link."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise InvalidRequest.field("digest", repr(digest), "must be sha256: and 64 hex digits")
    path = Path("blobs", "sha256", match[1])
    if not _is_inside(folder, path):
        raise DataLoss(f"blob {digest} is missing from {folder}")
    return folder / path


def _is_inside(folder: Path, path: Path) -> bool:
    """Whether a folder has this file, and no link leads out of the folder to it."""
    return (folder / path).is_file() and (folder / path).resolve() == folder.resolve() / path


def _read(path: Path, what: str, digest: str = "") -> dict[str, Any]:
    """A JSON object of a layout, checked against its digest if it has one."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise InvalidRequest.field(what, str(path), f"cannot be read: {error.strerror}") from None
    if digest and digest != f"sha256:{hashlib.sha256(raw).hexdigest()}":
        raise DataLoss(f"{what} {digest} is damaged")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest.field(what, str(path), "is not a JSON object")
    return value


def _objects(document: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """A list of objects in a document of a layout."""
    value = document.get(field)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidRequest.field(field, type(value).__name__, "must be a list of objects")
    return value


def _layer_type(path: str, form: str) -> str:
    if form == OCI:
        return "application/octet-stream"
    if path.endswith(".safetensors"):
        return f"{_MODEL}.weight.v1.raw"
    kind = "doc" if path in ("README.md", "LICENSE") else "weight.config"
    return f"{_MODEL}.{kind}.v1.raw"


def _model_config(version: AdapterVersion) -> tuple[str, bytes]:
    """ModelPack's config, without the time of export, so that equal versions have equal exports."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(version.created_unix_s))
    value = {
        "descriptor": {
            "createdAt": created,
            "name": f"{version.tenant}/{version.name}",
            "version": f"v{version.version}",
            "title": f"LoRA adapter for {version.base_id}",
        },
        "modelfs": {
            "type": "layers",
            "diffIds": [f"sha256:{file.sha256}" for file in version.files],
        },
        "config": {"architecture": "lora", "format": "safetensors"},
    }
    return f"{_MODEL}.config.v1+json", _json(value)


def _annotations(version: AdapterVersion) -> dict[str, str]:
    return {
        "dev.loraplex.adapter": version.ref,
        "dev.loraplex.base": version.base_id,
        "dev.loraplex.base-fingerprint": version.base_fingerprint,
        "dev.loraplex.digest": version.digest,
    }


def _stored(blobs: Path, media_type: str, data: bytes) -> dict[str, Any]:
    """Write a blob; returns its descriptor."""
    sha256 = hashlib.sha256(data).hexdigest()
    (blobs / sha256).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{sha256}", "size": len(data)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
