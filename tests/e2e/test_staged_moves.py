"""`--when-loaded` on a real stack: requests never meet a version that is not loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import ADAPTERS, Stack, eventually, start

NAME = "staged"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three versions of one adapter; `latest` is v1."""
    running = start(tmp_path_factory.mktemp("staged") / "state")
    try:
        running.publish(ADAPTERS[0], NAME)
        for folder in ADAPTERS[1:3]:
            running.run_registry("upload", str(folder), "--name", NAME, "--no-latest")
        yield running
    finally:
        assert running.stop() == 0


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


def test_tag_moves_once_the_version_is_loaded(own: Stack) -> None:
    own.complete(NAME, "warm")
    new = digest_of(own, 2)
    assert new not in resident(own)
    moved = own.run_registry("tag", f"{NAME}:v2", "latest", "--when-loaded=60s", "--wait", "--json")
    assert [t["version"] for t in json.loads(moved.stdout)["targets"]] == [2]
    assert [t["version"] for t in tag_of(own)["targets"]] == [2]
    assert new in resident(own)
    assert tag_of(own)["pending_reason"] == ""
    status, _ = own.post("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 2})
    assert status == 200


def test_version_that_cannot_be_loaded_leaves_the_tag_and_shows_why(own: Stack) -> None:
    before = tag_of(own)["targets"]
    shown = json.loads(own.run_registry("show", f"{NAME}:v3", "--json").stdout)
    tensors = next(f for f in shown["files"] if f["path"] == "adapter_model.safetensors")
    blob = blob_path(own.state_dir, tensors["sha256"])
    whole = blob.read_bytes()
    blob.write_bytes(b"\0" * len(whole))
    words = ("tag", f"{NAME}:v3", "latest", "--when-loaded=30s", "--wait")
    done = own.run_registry(*words, check=False)
    assert done.returncode == 6 and "was not taken" in done.stderr
    assert "was not taken" in tag_of(own)["pending_reason"]
    assert tag_of(own)["targets"] == before
    assert "was not taken" in own.run_registry("show", f"{NAME}:v1").stdout
    own.complete(NAME, "still served")


def test_upload_can_be_staged_too(own: Stack) -> None:
    folder = str(ADAPTERS[3])
    own.run_registry("upload", folder, "--name", NAME, "--tag", "next", "--when-loaded")
    eventually(lambda: [t["version"] for t in tag_of(own, "next")["targets"]] == [4])
    assert digest_of(own, 4) in resident(own)


def blob_path(state_dir: Path, sha256: str) -> Path:
    return next((state_dir / "objects").rglob(sha256))
