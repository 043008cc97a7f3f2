"""`--when-loaded` on a real stack: requests never meet a version that is not loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.workload.adapter_variants import write_variant
from tests.e2e.stack import ADAPTERS, Stack, eventually

NAME = "staged"


@pytest.fixture(scope="module")
def variants(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four adapters that nobody else has; three are versions of one name, and `latest` is v1."""
    root = tmp_path_factory.mktemp("staged")
    folders = [root / str(number) for number in range(1, 5)]
    for number, folder in enumerate(folders, start=1):
        write_variant(ADAPTERS[0], number, folder)
    stack.publish(folders[0], name=NAME)
    stack.publish(*folders[1:3], name=NAME, latest=False)
    return folders


def tag_of(stack: Stack, tag: str = "latest") -> dict[str, Any]:
    shown = json.loads(stack.run_registry("show", f"{NAME}:v1", "--json").stdout)
    found: dict[str, Any] = next(t for t in shown["adapter_tags"] if t["tag"] == tag)
    return found


def digest_of(stack: Stack, version: int) -> str:
    shown = json.loads(stack.run_registry("show", f"{NAME}:v{version}", "--json").stdout)
    return str(shown["digest"])


def resident(stack: Stack) -> set[str]:
    """Digests that the worker's residency gauge shows on the device."""
    import grpc

    from loraplex.v1 import admin_pb2, admin_pb2_grpc

    with grpc.insecure_channel(stack.grpc) as channel:
        request = admin_pb2.GetStatusRequest(include_adapters=True)
        status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(request)
    return {a.residency.digest for worker in status.workers for a in worker.adapters}


@pytest.mark.usefixtures("variants")
def test_tag_moves_once_the_version_is_loaded(stack: Stack) -> None:
    stack.complete(NAME, "warm")
    new = digest_of(stack, 2)
    assert new not in resident(stack)
    moved = stack.run_registry(
        "tag", f"{NAME}:v2", "latest", "--when-loaded=60s", "--wait", "--json"
    )
    assert [t["version"] for t in json.loads(moved.stdout)["targets"]] == [2]
    assert [t["version"] for t in tag_of(stack)["targets"]] == [2]
    assert new in resident(stack)
    assert tag_of(stack)["pending_reason"] == ""
    status, _ = stack.post("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 2})
    assert status == 200


@pytest.mark.usefixtures("variants")
def test_version_that_cannot_be_loaded_leaves_the_tag_and_shows_why(stack: Stack) -> None:
    before = tag_of(stack)["targets"]
    shown = json.loads(stack.run_registry("show", f"{NAME}:v3", "--json").stdout)
    tensors = next(f for f in shown["files"] if f["path"] == "adapter_model.safetensors")
    blob = blob_path(stack.state_dir, tensors["sha256"])
    whole = blob.read_bytes()
    blob.write_bytes(b"\0" * len(whole))
    words = ("tag", f"{NAME}:v3", "latest", "--when-loaded=30s", "--wait")
    done = stack.run_registry(*words, check=False)
    assert done.returncode == 6 and "was not taken" in done.stderr
    assert "was not taken" in tag_of(stack)["pending_reason"]
    assert tag_of(stack)["targets"] == before
    assert "was not taken" in stack.run_registry("show", f"{NAME}:v1").stdout
    stack.complete(NAME, "still served")


def test_upload_can_be_staged_too(stack: Stack, variants: list[Path]) -> None:
    folder = str(variants[3])
    stack.run_registry("upload", folder, "--name", NAME, "--tag", "next", "--when-loaded")
    eventually(lambda: [t["version"] for t in tag_of(stack, "next")["targets"]] == [4])
    assert digest_of(stack, 4) in resident(stack)


def test_an_upload_that_waits_prints_the_tags_as_they_are_after_the_move(
    stack: Stack, variants: list[Path]
) -> None:
    words = ("upload", str(variants[3]), "--name", "waited", "--tag", "prod", "--when-loaded=60s")
    done = stack.run_registry(*words, "--wait", "--json")
    assert sorted(json.loads(done.stdout)["tags"]) == ["latest", "prod"]


def blob_path(state_dir: Path, sha256: str) -> Path:
    return next((state_dir / "objects").rglob(sha256))
