"""Adapters from OCI registries: the distribution project's own, and a small hostile one."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_format.folder import read_files
from loraplex.client.publishing import local_files, read_adapter
from loraplex.errors import DataLoss, InvalidRequest, NotFound, PermissionDenied, Unavailable
from loraplex.model_layout import MANIFEST_TYPE
from loraplex.sources import fetch, oci
from tests.servers import free_port
from tests.sources.servers import TokenRegistry, served

ADAPTER = Path(__file__).parents[2] / "demo" / "adapters" / "mask"
FILES = {path.name: path.read_bytes() for path in ADAPTER.iterdir()}
LOGIN = base64.b64encode(b"user:secret").decode()
CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def artifact(files: dict[str, bytes], **changes: Any) -> tuple[bytes, dict[str, bytes]]:
    """A manifest as `oras push` makes it, and the blobs by digest."""
    layers = [
        {
            "mediaType": "application/octet-stream",
            "digest": digest_of(content),
            "size": len(content),
            "annotations": {"org.opencontainers.image.title": name},
        }
        for name, content in files.items()
    ]
    config = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": digest_of(b"{}"),
        "size": 2,
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": "application/vnd.example.lora",
        "config": config,
        "layers": layers,
        **changes,
    }
    blobs = {digest_of(content): content for content in (*files.values(), b"{}")}
    return json.dumps(manifest).encode(), blobs


def adapter_of(folder: Path) -> dict[str, bytes]:
    """The adapter in a fetched layout, read as an upload reads it."""
    assert read_adapter(folder) == read_files({f.path: f.location for f in local_files(folder)})
    return {file.path: file.location.read_bytes() for file in local_files(folder)}


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry of the distribution project (`apt-get install docker-registry`)."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("needs docker-registry: apt-get install docker-registry")
    folder, port = tmp_path_factory.mktemp("distribution"), free_port()
    (folder / "config.yml").write_text(CONFIG.format(root=folder / "data", port=port))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [program, "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    address = f"127.0.0.1:{port}"
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://{address}/v2/", timeout=1).close()
            break
        except OSError:
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
    yield address
    server.terminate()
    server.wait(20)


def push(address: str, tag: str, manifest: bytes, blobs: dict[str, bytes]) -> None:
    """As the distribution specification says."""
    base = f"http://{address}/v2/acme/support"
    for digest, content in blobs.items():
        post = urllib.request.Request(f"{base}/blobs/uploads/", method="POST", data=b"")
        with urllib.request.urlopen(post, timeout=10) as answer:
            location = answer.headers["Location"]
        url = f"{location}{'&' if '?' in location else '?'}digest={digest}"
        octets = {"Content-Type": "application/octet-stream"}
        put = urllib.request.Request(url, content, octets, method="PUT")
        urllib.request.urlopen(put, timeout=10).close()
    headers = {"Content-Type": json.loads(manifest)["mediaType"]}
    put = urllib.request.Request(f"{base}/manifests/{tag}", manifest, headers, method="PUT")
    urllib.request.urlopen(put, timeout=10).close()


def test_a_real_registry_gives_back_what_was_pushed(distribution: str, tmp_path: Path) -> None:
    manifest, blobs = artifact(FILES)
    push(distribution, "v7", manifest, blobs)
    push(distribution, "latest", manifest, blobs)
    for index, name in enumerate(
        ("", ":v7", f"@{digest_of(manifest)}", f":v7@{digest_of(manifest)}")
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert fetch(f"oci://{distribution}/acme/support{name}", folder, pickled=False) == ()
        assert adapter_of(folder) == FILES


def test_an_index_of_one_manifest_stands_for_it(distribution: str, tmp_path: Path) -> None:
    manifest, blobs = artifact(FILES)
    push(distribution, digest_of(manifest), manifest, blobs)
    entry = {"mediaType": MANIFEST_TYPE, "digest": digest_of(manifest), "size": len(manifest)}
    kind = "application/vnd.oci.image.index.v1+json"
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": [entry]}
    push(distribution, "indexed", json.dumps(index).encode(), {})
    fetch(f"oci://{distribution}/acme/support:indexed", tmp_path, pickled=False)
    assert adapter_of(tmp_path) == FILES


@pytest.mark.parametrize(
    "name", ["acme/support:v8", "acme/other:v7", f"acme/support@sha256:{'0' * 64}"]
)
def test_what_a_real_registry_does_not_have_is_said(
    distribution: str, tmp_path: Path, name: str
) -> None:
    with pytest.raises(NotFound, match="is not in the registry"):
        fetch(f"oci://{distribution}/{name}", tmp_path, pickled=False)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "acme",
        "HOST/Upper:v1",
        "h/a:b:c",
        "h/a@sha256:12",
        "h/a@md5:" + "0" * 32,
        "h/../a",
        "h/a?x",
    ],
)
def test_addresses_of_another_form_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="must be oci://HOST"):
        fetch(f"oci://{address}", tmp_path, pickled=False)


@pytest.fixture
def private() -> Iterator[TokenRegistry]:
    """Wants a token, and keeps its blobs on another host."""
    manifest, blobs = artifact(FILES)
    registry = TokenRegistry(manifest, blobs, LOGIN)
    with served(registry) as registry.address, served(registry.kept) as registry.store:
        yield registry


@pytest.fixture
def logged_in(private: TokenRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker login` leaves it."""
    (tmp_path / "docker").mkdir()
    config = {"auths": {private.address: {"auth": LOGIN}}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.usefixtures("logged_in")
def test_a_login_buys_a_token_that_other_hosts_never_see(private: TokenRegistry, out: Path) -> None:
    fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)
    assert adapter_of(out) == FILES


def test_without_a_login_the_command_to_log_in_is_named(
    private: TokenRegistry, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(out))
    with pytest.raises(PermissionDenied, match=f"docker login {private.address}"):
        fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("change", ["damaged", "longer", "shorter"])
def test_blobs_that_are_not_what_the_manifest_says_are_refused(
    private: TokenRegistry, out: Path, change: str
) -> None:
    for digest, content in private.blobs.items():
        flipped = bytes([content[0] ^ 1]) + content[1:]
        changes = {"damaged": flipped, "longer": content * 2, "shorter": content[:-1]}
        private.blobs[digest] = changes[change]
    with pytest.raises(DataLoss):
        fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        ({"digest": "sha256:../../x"}, "is not a layer with a sha256 digest"),
        ({"size": 1 << 50}, "is not a layer with a sha256 digest"),
        ({"size": "9"}, "is not a layer with a sha256 digest"),
        ({"annotations": {}}, "so its file has no name"),
        ({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}, "archived or compressed"),
    ],
)
def test_layers_that_are_no_plain_files_are_refused(
    private: TokenRegistry, out: Path, layer: dict[str, Any], problem: str
) -> None:
    manifest = json.loads(private.manifest)
    manifest["layers"][0] |= layer
    private.manifest = json.dumps(manifest).encode()
    with pytest.raises(InvalidRequest, match=problem):
        fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("manifest", [b"[]", b"{", b"{}", b'{"layers": 3}', b'{"manifests": []}'])
def test_manifests_of_another_form_are_refused(
    private: TokenRegistry, out: Path, manifest: bytes
) -> None:
    private.manifest = manifest
    with pytest.raises(InvalidRequest):
        fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)


def test_a_registry_that_is_away_is_unavailable(out: Path) -> None:
    with pytest.raises(Unavailable, match="the registry cannot be reached"):
        fetch("oci://127.0.0.1:9/acme/support:v7", out, pickled=False)


@pytest.mark.hostile
@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("answer", [[], {}, {"token": {}}, {"token": 7}, "x", None])
def test_an_answer_without_a_token_is_a_registry_that_does_not_answer_as_it_should(
    private: TokenRegistry, out: Path, answer: object
) -> None:
    private.token = answer
    with pytest.raises(Unavailable, match="sent no token"):
        fetch(f"oci://{private.address}/acme/support:v7", out, pickled=False)


@pytest.mark.hostile
def test_a_login_of_a_remote_registry_is_never_sent_over_plain_http() -> None:
    challenge = 'Bearer realm="http://127.0.0.1:1/token",service="s"'
    with pytest.raises(PermissionDenied, match="requires a login"):
        oci._answer_to(challenge, "registry.example")
