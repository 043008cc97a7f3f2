"""Versions as OCI image layouts and back, and uploads from a hub cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.publishing import local_files
from loraplex.errors import DataLoss, InvalidAdapter, InvalidRequest
from loraplex.model_layout import layout_files


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _manifest(folder: Path) -> dict[str, Any]:
    [entry] = json.loads((folder / "index.json").read_text())["manifests"]
    manifest: dict[str, Any] = json.loads(_blob(folder, entry["digest"]).read_text())
    return manifest


@pytest.fixture
def layout(registry: Any, adapter: Path, tmp_path: Path) -> Path:
    registry.json("upload", str(adapter), "--name", "exported")
    registry.json("export", "exported", str(tmp_path / "layout"))
    return tmp_path / "layout"


@pytest.mark.e2e
@pytest.mark.parametrize("form", ["modelpack", "oci"])
def test_an_exported_version_uploads_again_as_the_same_content(
    registry: Any, adapter: Path, tmp_path: Path, form: str
) -> None:
    first = registry.json("upload", str(adapter), "--name", f"from-{form}")
    folder = tmp_path / "layout"
    exported = registry.json("export", f"from-{form}", str(folder), "--format", form)
    assert exported["digest"] == first["digest"]
    checked = registry.json("upload", str(folder), "--name", f"to-{form}", "--dry-run")
    assert checked["base_id"] == "loraplex-demo"
    again = registry.json("upload", str(folder), "--name", f"to-{form}")
    assert again["digest"] == first["digest"]
    assert registry.json("upload", str(folder), "--name", f"from-{form}")["created"] is False
    code, refused = registry.error("export", f"from-{form}", str(folder))
    assert code == 4 and "--force" not in str(refused), "there is none to offer"


@pytest.mark.e2e
def test_a_modelpack_has_the_types_and_names_of_the_specification(layout: Path) -> None:
    manifest = _manifest(layout)
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    layers = {
        layer["annotations"]["org.cncf.model.filepath"]: layer for layer in manifest["layers"]
    }
    kinds = {path: layer["mediaType"] for path, layer in layers.items()}
    assert kinds["adapter_model.safetensors"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["adapter_config.json"] == "application/vnd.cncf.model.weight.config.v1.raw"
    config = json.loads(_blob(layout, manifest["config"]["digest"]).read_text())
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
    for layer in [*manifest["layers"], manifest["config"]]:
        assert _blob(layout, layer["digest"]).stat().st_size == layer["size"]
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


@pytest.mark.e2e
def test_a_layout_with_damaged_bytes_is_not_uploaded(registry: Any, layout: Path) -> None:
    blob = _blob(layout, _manifest(layout)["layers"][-1]["digest"])
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    _, error = registry.error("upload", str(layout), "--name", "damaged")
    assert error["code"] == "DATA_LOSS"
    blob.unlink()
    with pytest.raises(DataLoss, match="missing"):
        layout_files(layout)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("[]", "index.json"),
        ("{", "index.json"),
        ('{"manifests": []}', "manifests"),
        ('{"manifests": [1]}', "manifests"),
        ('{"manifests": [{"digest": "sha256:../../x"}]}', "digest"),
        ('{"manifests": [{"digest": 7}]}', "digest"),
    ],
)
def test_what_is_no_layout_of_one_adapter_is_refused(
    tmp_path: Path, index: str, named: str
) -> None:
    (tmp_path / "oci-layout").write_text("{}")
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(InvalidRequest, match=named):
        local_files(tmp_path)


@pytest.fixture
def snapshot(adapter: Path, tmp_path: Path) -> Path:
    """The adapter as a hub cache keeps it: a snapshot of links to blobs."""
    repository = tmp_path / "models--acme--mask"
    folder = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, path in enumerate(adapter.iterdir()):
        shutil.copy(path, repository / "blobs" / f"{number}")
        (folder / path.name).symlink_to(Path("../../blobs") / f"{number}")
    return folder


@pytest.mark.e2e
def test_a_snapshot_of_a_hub_cache_uploads_as_its_files(
    registry: Any, adapter: Path, snapshot: Path
) -> None:
    plain = registry.json("upload", str(adapter), "--name", "cached")
    cached = registry.json("upload", str(snapshot), "--name", "cached")
    assert (cached["digest"], cached["created"]) == (plain["digest"], False)


def test_links_that_leave_the_cache_or_lie_outside_one_are_refused(
    adapter: Path, snapshot: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("{}")
    (snapshot / "README.md").unlink(missing_ok=True)
    (snapshot / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidAdapter, match="is a link"):
        local_files(snapshot)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in adapter.iterdir():
        (plain / path.name).symlink_to(path)
    with pytest.raises(InvalidAdapter, match="is a link"):
        local_files(plain)


@pytest.mark.hostile
def test_blobs_of_a_cache_that_are_a_link_to_somebody_elses_files_are_refused(
    adapter: Path, snapshot: Path, tmp_path: Path
) -> None:
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(InvalidAdapter, match="is a link"):
        local_files(snapshot)


@pytest.mark.hostile
@pytest.mark.parametrize("linked", ["index.json", "blobs", "blobs/sha256"])
def test_a_layout_with_links_to_somebody_elses_files_is_refused(
    tmp_path: Path, linked: str
) -> None:
    folder, private = tmp_path / "layout", tmp_path / "private"
    layer = hashlib.sha256(b"weights").hexdigest()
    named = {"org.opencontainers.image.title": "README.md"}
    layers = [{"digest": f"sha256:{layer}", "size": 7, "annotations": named}]
    manifest = json.dumps({"layers": layers}).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "blobs" / "sha256" / layer).write_bytes(b"weights")
    (folder / "blobs" / "sha256" / digest).write_bytes(manifest)
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}))
    assert [file.path for file in layout_files(folder)] == ["README.md"]
    (folder / linked).rename(private)
    (folder / linked).symlink_to(private)
    with pytest.raises((DataLoss, InvalidRequest)):
        layout_files(folder)


@pytest.mark.e2e
def test_a_layout_is_checked_offline_like_a_folder(
    registry: Any, offline: Any, adapter: Path, layout: Path
) -> None:
    base = str(Path(__file__).parents[2] / "demo" / "base")
    checked = offline.json("validate", str(layout), "--base", base)
    assert checked["digest"] == offline.json("validate", str(adapter), "--base", base)["digest"]
    manifest = _manifest(layout)
    [config] = [
        layer for layer in manifest["layers"]
        if layer["annotations"]["org.cncf.model.filepath"] == "adapter_config.json"
    ]  # fmt: skip
    _blob(layout, config["digest"]).write_bytes(b"x" * config["size"])
    assert offline.error("validate", str(layout))[1]["code"] == "DATA_LOSS"
