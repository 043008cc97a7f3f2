"""Adapters from an OCI registry (distribution specification 1.1), written as an image layout.

The artifact has one raw layer for each file, as ORAS, ModelPack tools and `registry export` make
it: `model_layout` reads media types and annotations. Every blob is compared with its digest while
it arrives. Credentials are those of `docker login` and `oras login` (config.json); registries on
this machine are reached over plain HTTP, all others over HTTPS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from loraplex.adapter_format.files import MAX_TENSOR_FILE_BYTES
from loraplex.client.progress import Progress
from loraplex.errors import (
    DataLoss,
    InvalidRequest,
    LoraplexError,
    NotFound,
    PermissionDenied,
    Unavailable,
    Violation,
)
from loraplex.model_layout import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    MARKER,
    MAX_DOCUMENT_BYTES,
    layout_files,
)
from loraplex.sources.selection import write_bounded

TIMEOUT_S = 60.0
MAX_LAYERS = 64
_CHUNK_BYTES = 1 << 20
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(:\d+)?|\[[0-9a-f:]+\](:\d+)?)"
    r"/(?P<repository>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.ASCII)


@dataclass(slots=True)
class _Registry:
    """One repository of a registry."""

    source: str
    host: str
    repository: str
    authorization: str = ""

    def open(self, path: str, accept: str = "*/*") -> HTTPResponse:
        """GET a path below the repository, with a token if the registry asks for one.

        Raises: NotFound, PermissionDenied or Unavailable.
        """
        scheme = "http" if _LOOPBACK.fullmatch(self.host) else "https"
        url = f"{scheme}://{self.host}/v2/{self.repository}/{path}"
        try:
            return _get(url, self.authorization, accept)
        except urllib.error.HTTPError as error:
            if error.code != 401 or self.authorization:
                raise self._typed(error) from error
            challenge = error.headers.get("WWW-Authenticate", "")
        except (OSError, HTTPException) as error:
            raise self._away(error) from error
        try:
            self.authorization = _answer_to(challenge, self.host)
            return _get(url, self.authorization, accept)
        except urllib.error.HTTPError as error:
            raise self._typed(error) from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise self._away(error) from error

    def read_manifest(self, reference: str, digest: str = "") -> tuple[bytes, str]:
        """Read the manifest or index that a tag or digest names; returns it and its own digest."""
        accept = f"{MANIFEST_TYPE}, {INDEX_TYPE}"
        with self.open(f"manifests/{reference}", accept) as answer:
            raw = answer.read(MAX_DOCUMENT_BYTES + 1)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise DataLoss(f"{self.source}: a manifest of more than {MAX_DOCUMENT_BYTES} bytes")
        own = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if digest and own != digest:
            raise DataLoss(f"{self.source}: the received manifest has the digest {own}")
        return raw, own

    def chunks(self, digest: str) -> Iterator[bytes]:
        """A blob's bytes."""
        with self.open(f"blobs/{digest}") as answer:
            try:
                while chunk := answer.read(_CHUNK_BYTES):
                    yield chunk
            except (OSError, HTTPException) as error:
                raise self._away(error) from error

    def _typed(self, error: urllib.error.HTTPError) -> LoraplexError:
        if error.code == 404:
            return NotFound(f"{self.source} is not in the registry; check its name and tag")
        if error.code in (401, 403):
            hint = f"log in with 'docker login {self.host}' or 'oras login {self.host}'"
            return PermissionDenied(f"{self.source}: the registry refuses access; {hint}")
        return self._away(error)

    def _away(self, error: BaseException) -> Unavailable:
        problem = f"cannot be reached, or gave an unexpected answer: {error}"
        return Unavailable(f"{self.source}: the registry {problem}")


def fetch_from_registry(address: str, folder: Path, progress: Progress) -> tuple[Violation, ...]:
    """See `sources.fetch`. `address` is `HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`."""
    source = f"oci://{address}"
    match = _ADDRESS.fullmatch(address)
    if match is None:
        form = "must be oci://HOST[:PORT]/REPOSITORY[:TAG|@sha256:HEX], in lower case"
        raise InvalidRequest.field("DIR", source, form)
    registry = _Registry(source, match["host"], match["repository"])
    digest = match["digest"] or ""
    raw, own = registry.read_manifest(digest or match["tag"] or "latest", digest)
    manifest = _object(raw, source)
    if manifest.get("mediaType") == INDEX_TYPE or "manifests" in manifest:
        entries = _list_of(manifest, "manifests", source)
        if len(entries) != 1:
            description = f"is an index of {len(entries)} manifests; name one by its digest"
            raise InvalidRequest.field("DIR", source, description)
        digest = str(entries[0].get("digest"))
        raw, own = registry.read_manifest(digest, digest)
        manifest = _object(raw, source)
    _write_layout(folder, raw, own)
    layers = _list_of(manifest, "layers", source)
    if len(layers) > MAX_LAYERS:
        raise InvalidRequest.field("DIR", source, f"has more than {MAX_LAYERS} layers")
    for layer in layers:
        _fetch_layer(registry, layer, folder, progress)
    layout_files(folder)
    return ()


def _write_layout(folder: Path, manifest: bytes, digest: str) -> None:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / digest.removeprefix("sha256:")).write_bytes(manifest)
    entry = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": len(manifest)}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / MARKER).write_text('{"imageLayoutVersion":"1.0.0"}')


def _fetch_layer(
    registry: _Registry, layer: Mapping[str, Any], folder: Path, progress: Progress
) -> None:
    digest, size = str(layer.get("digest")), layer.get("size")
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", digest)
    if match is None or type(size) is not int or not 0 <= size <= MAX_TENSOR_FILE_BYTES:
        description = (
            f"is not a layer with a sha256 digest and at most {MAX_TENSOR_FILE_BYTES} bytes"
        )
        raise InvalidRequest.field("manifest:layers", f"{digest}, {size} bytes", description)
    target = folder / "blobs" / "sha256" / match[1]
    name = f"layer {digest[:19]}"
    found = write_bounded(name, registry.chunks(digest), target, size, progress)
    if found != match[1]:
        raise DataLoss(f"{registry.source}: {digest} arrived damaged; try again")


def _get(url: str, authorization: str, accept: str) -> HTTPResponse:
    """Follow redirects, for example to the store behind a registry. The credentials are sent to the
    registry only."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    return answer


def _answer_to(challenge: str, host: str) -> str:
    """The value of `Authorization` that a registry asks for. Raises: HTTPError if a token is
    refused; ValueError if no credentials fit.
    """
    scheme, _, rest = challenge.partition(" ")
    basic = _stored_login(host)
    if scheme.lower() == "basic" and basic:
        return f"Basic {basic}"
    fields = dict(_CHALLENGE.findall(rest))
    realm = fields.get("realm", "")
    # A login uses plain HTTP only if the registry itself is reached over plain HTTP.
    is_local = _LOOPBACK.fullmatch(host) and realm.startswith("http://")
    if scheme.lower() != "bearer" or not (is_local or realm.startswith("https://")):
        raise PermissionDenied(f"{host} requires a login: 'docker login {host}'")
    query = {key: fields[key] for key in ("service", "scope") if key in fields}
    url = f"{realm}?{urllib.parse.urlencode(query)}"
    with _get(url, f"Basic {basic}" if basic else "", "application/json") as answer:
        answered = json.loads(answer.read(1 << 20))
    found = answered if isinstance(answered, dict) else {}
    token = found.get("token") or found.get("access_token")
    if not isinstance(token, str):
        raise ValueError("its token service sent no token")
    return f"Bearer {token}"


def _stored_login(host: str) -> str:
    """base64 of user:password for a registry in docker's config.json; "" = none."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        auths = json.loads((folder / "config.json").read_bytes()).get("auths", {})
        auth = auths.get(host, auths.get(f"https://{host}", {})).get("auth", "")
        base64.b64decode(auth, validate=True)
    except (OSError, ValueError, AttributeError):
        return ""
    return str(auth)


def _object(raw: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest.field("DIR", source, "has a manifest that is not a JSON object")
    return value


def _list_of(document: Mapping[str, Any], field: str, source: str) -> list[dict[str, Any]]:
    value = document.get(field)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidRequest.field("DIR", source, f"has a manifest without a list of {field}")
    return value
