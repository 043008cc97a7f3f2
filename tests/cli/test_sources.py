"""`registry upload` from the hub, from a bucket and from an OCI registry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.s3_servers import moto, new_bucket
from tests.sources.servers import Hub, served
from tests.sources.test_oci import LOGIN, TokenRegistry, artifact

pytestmark = pytest.mark.e2e


@pytest.fixture
def files(adapter: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in adapter.iterdir()}


@pytest.fixture
def published(registry: Any, adapter: Path) -> str:
    """The digest that the same adapter has when it is uploaded from its folder."""
    digest: str = registry.json("upload", str(adapter), "--name", "from-folder")["digest"]
    return digest


def _with(registry: Any, tmp_path: Path, **variables: str) -> Any:
    """The command with more variables, and a folder of its own for what is temporary."""
    (tmp_path / "scratch").mkdir()
    own = {"TMPDIR": str(tmp_path / "scratch"), "HF_HOME": str(tmp_path / "hf"), **variables}
    return replace(registry, variables={**registry.variables, **own})


def test_an_adapter_of_the_hub_is_published(
    registry: Any, files: dict[str, bytes], published: str, tmp_path: Path
) -> None:
    with served(Hub({**files, "loss.png": b"1"})) as address:
        command = _with(registry, tmp_path, HF_ENDPOINT=f"http://{address}")
        done = command.json("upload", "hf://acme/lora@main", "--name", "from-hub")
        assert done["digest"] == published
        strict = command.error("upload", "hf://acme/lora", "--name", "strict", "--strict")
        assert (strict[0], strict[1]["violations"][0]["value"]) == (3, "loss.png")
        assert command.error("upload", "hf://acme/none", "--name", "x")[0] == 7
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_arrives_damaged_is_not_published(
    registry: Any, files: dict[str, bytes], tmp_path: Path
) -> None:
    weights = files["adapter_model.safetensors"]
    hub = Hub(files, sent={"adapter_model.safetensors": weights[:-1] + b"\x01"})
    with served(hub) as address:
        command = _with(registry, tmp_path, HF_ENDPOINT=f"http://{address}")
        code, error = command.error("upload", "hf://acme/lora", "--name", "damaged")
    assert (code, error["code"]) == (1, "DATA_LOSS")
    assert registry.error("show", "damaged")[0] == 7
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_pickle_of_the_hub_is_converted_on_the_way(
    registry: Any, files: dict[str, bytes], adapter: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.save(load_file(adapter / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    del files["adapter_model.safetensors"]
    files["adapter_model.bin"] = (tmp_path / "adapter_model.bin").read_bytes()
    with served(Hub(files)) as address:
        command = _with(registry, tmp_path, HF_ENDPOINT=f"http://{address}")
        code, error = command.error("upload", "hf://acme/lora", "--name", "old")
        assert code == 3 and "--convert" in error["violations"][0]["description"]
        done = command.json("upload", "hf://acme/lora", "--convert", "--name", "old")
        assert done["created"]


def test_an_adapter_of_a_bucket_is_published(
    registry: Any, files: dict[str, bytes], published: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with moto() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        bucket = new_bucket()
        for name, content in files.items():
            boto3.client("s3").put_object(Bucket=bucket, Key=f"v7/{name}", Body=content)
        command = _with(registry, tmp_path, **variables)
        done = command.json("upload", f"s3://{bucket}/v7", "--name", "from-bucket")
        assert done["digest"] == published
        assert command.error("upload", f"s3://{bucket}/v8", "--name", "x")[0] == 7


def test_an_artifact_of_a_private_oci_registry_is_published(
    registry: Any, files: dict[str, bytes], published: str, tmp_path: Path
) -> None:
    oci = TokenRegistry(*artifact(files), LOGIN)
    with served(oci) as oci.address, served(oci.kept) as oci.store:
        command = _with(registry, tmp_path, DOCKER_CONFIG=str(tmp_path))
        source = f"oci://{oci.address}/acme/support:v7"
        code, error = command.error("upload", source, "--name", "from-oci")
        assert code == 5 and f"docker login {oci.address}" in error["message"]
        login = {"auths": {oci.address: {"auth": LOGIN}}}
        (tmp_path / "config.json").write_text(json.dumps(login))
        assert command.json("upload", source, "--name", "from-oci")["digest"] == published
