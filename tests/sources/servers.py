"""Servers that speak the API of the Hugging Face hub and of an OCI registry, small and strict.

The hub's is asked by huggingface_hub. The registry's does what a real one does not do on demand:
ask for tokens, redirect blobs to another host, and damage them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Answer = tuple[int, dict[str, str], bytes]
COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def served(answer: Callable[[str, str, Mapping[str, str]], Answer]) -> Iterator[str]:
    """A server on a free port; yields HOST:PORT. `answer` gets method, path and headers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = answer(self.command, unquote(self.path), self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    """An answer of JSON."""
    return status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()


@dataclass
class Hub:
    """One repository, `acme/lora`, with a branch `main` and a tag `v1` of one commit."""

    files: dict[str, bytes]
    lfs: frozenset[str] = frozenset({"adapter_model.safetensors", "adapter_model.bin"})
    token: str = ""
    """What must be shown."""
    sent: dict[str, bytes] = field(default_factory=dict)
    """By file, what is sent in its place."""
    asked: list[str] = field(default_factory=list)

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        self.asked.append(f"{method} {path}")
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}
            return as_json({"error": "gated"}, 403, **code)
        if path.startswith(f"/api/models/acme/lora/tree/{COMMIT}"):
            siblings = [self._sibling(name) for name in self.files]
            return as_json(
                [
                    {"type": "file", "path": s["rfilename"], "size": s["size"], "oid": s["blobId"]}
                    for s in siblings
                ]
            )
        if path.startswith("/api/models/acme/lora"):
            revision = path.partition("/revision/")[2].partition("?")[0] or "main"
            if revision not in ("main", "v1", COMMIT):
                return as_json({"error": "no"}, 404, **{"X-Error-Code": "RevisionNotFound"})
            siblings = [self._sibling(name) for name in self.files]
            return as_json({"id": "acme/lora", "sha": COMMIT, "siblings": siblings})
        prefix = f"/acme/lora/resolve/{COMMIT}/"
        if path.startswith(prefix) and (name := path.removeprefix(prefix)) in self.files:
            body = self.sent.get(name, self.files[name])
            etag = hashlib.sha256(body).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body
        return as_json({"error": "no"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def _sibling(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": sha1}
        if name in self.lfs:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        return entry


@dataclass
class TokenRegistry:
    """An OCI registry that wants a token for acme/support, and keeps its blobs on another host."""

    manifest: bytes
    blobs: dict[str, bytes]
    login: str
    """base64 of user:password."""
    address: str = ""
    store: str = ""
    """HOST:PORT that blobs are redirected to."""
    token: object = field(default_factory=lambda: {"token": "t0ken"})
    """What the token service answers."""

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        authorization = headers.get("Authorization", "")
        if path.startswith("/token?"):
            if authorization != f"Basic {self.login}":
                return as_json({"errors": []}, 401)
            assert "scope=repository:acme/support:pull" in path, path
            return as_json(self.token)
        if authorization != "Bearer t0ken":
            challenge = (
                f'Bearer realm="http://{self.address}/token",service="test",'
                'scope="repository:acme/support:pull"'
            )
            return as_json({"errors": []}, 401, **{"WWW-Authenticate": challenge})
        if path == "/v2/acme/support/manifests/v7":
            return (
                200,
                {"Content-Type": "application/vnd.oci.image.manifest.v1+json"},
                self.manifest,
            )
        digest = path.removeprefix("/v2/acme/support/blobs/")
        if digest in self.blobs:
            return 307, {"Location": f"http://{self.store}/{digest}"}, b""
        return as_json({"errors": []}, 404)

    def kept(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """The other host, which must not see the registry's credentials."""
        assert "Authorization" not in headers
        return 200, {"Content-Type": "application/octet-stream"}, self.blobs[path.lstrip("/")]
