"""Uploading what a training left behind: the adapter arrives, the rest is named and stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

LEFT = ["checkpoint-20", "loss.png", "optimizer.pt", "runs", "training_args.bin"]


@pytest.fixture
def output(adapter: Path, tmp_path: Path) -> Path:
    """A trainer's folder around the adapter."""
    folder = tmp_path / "output"
    shutil.copytree(adapter, folder)
    shutil.copytree(adapter, folder / "checkpoint-20")
    for name in ("loss.png", "optimizer.pt", "training_args.bin", ".gitattributes"):
        (folder / name).write_bytes(b"\x80\x04not to be opened")
    (folder / "runs").mkdir()
    return folder


def test_a_trainers_folder_is_uploaded_and_its_leftovers_are_warned_about(
    registry: Any, adapter: Path, output: Path, tmp_path: Path
) -> None:
    clean = registry.json("upload", str(adapter), "--name", "clean")
    uploaded = registry.json("upload", str(output), "--name", "trained")
    assert uploaded["digest"] == clean["digest"]
    assert [warning["field"] for warning in uploaded["warnings"]] == LEFT
    registry.json("pull", "trained", str(tmp_path / "pulled"))
    names = {path.name for path in (tmp_path / "pulled").iterdir()}
    assert not names & {*LEFT, ".gitattributes"}


def test_strict_uploads_and_checks_refuse_leftovers(
    registry: Any, offline: Any, output: Path
) -> None:
    for command, args in (
        (registry, ("upload", str(output), "--name", "strict", "--strict")),
        (registry, ("upload", str(output), "--name", "strict", "--strict", "--dry-run")),
        (offline, ("validate", str(output), "--strict")),
    ):
        code, error = command.error(*args)
        assert code == 3
        assert [violation["field"] for violation in error["violations"]] == LEFT


def test_a_folder_of_checkpoints_alone_names_the_last(offline: Any, output: Path) -> None:
    (output / "adapter_config.json").unlink()
    (output / "adapter_model.safetensors").unlink()
    code, error = offline.error("validate", str(output))
    assert code == 3
    assert str(output / "checkpoint-20") in error["violations"][0]["description"]
