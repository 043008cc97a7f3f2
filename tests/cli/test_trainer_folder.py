"""Uploading what a training left behind: the adapter arrives, the rest is named and stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


def test_a_trainers_folder_is_uploaded_and_its_leftovers_are_named_once(
    registry: Any, adapter: Path, output: Path, tmp_path: Path
) -> None:
    clean = registry.json("upload", str(adapter), "--name", "clean")
    uploaded = registry.json("upload", str(output), "--name", "trained")
    assert uploaded["digest"] == clean["digest"]
    (note,) = uploaded["warnings"]
    assert note["field"] == "note" and note["description"].endswith(", ".join(LEFT))
    registry.json("pull", "trained", str(tmp_path / "pulled"))
    names = {path.name for path in (tmp_path / "pulled").iterdir()}
    assert not names & {*LEFT, ".gitattributes"}


def test_leftovers_of_a_training_never_fail_a_strict_check(
    registry: Any, offline: Any, output: Path
) -> None:
    registry.json("upload", str(output), "--name", "strict", "--strict", "--dry-run")
    registry.json("upload", str(output), "--name", "strict", "--strict")
    shown = offline("validate", str(output), "--strict").stderr
    assert shown.startswith("note: left out 5 entries of ") and shown.count("\n") == 1


def test_strict_uploads_and_checks_refuse_a_folder_with_another_adapter(
    registry: Any, offline: Any, output: Path
) -> None:
    (output / "checkpoint-20").rename(output / "poet")
    for command, args in (
        (registry, ("upload", str(output), "--name", "strict", "--strict")),
        (registry, ("upload", str(output), "--name", "strict", "--strict", "--dry-run")),
        (offline, ("validate", str(output), "--strict")),
    ):
        code, error = command.error(*args)
        assert code == 3
        assert [violation["field"] for violation in error["violations"]] == ["poet"]


def test_a_folder_of_checkpoints_alone_names_the_last(offline: Any, output: Path) -> None:
    (output / "adapter_config.json").unlink()
    (output / "adapter_model.safetensors").unlink()
    code, error = offline.error("validate", str(output))
    assert code == 3
    (violation,) = error["violations"]
    assert str(output / "checkpoint-20") in violation["description"]


def test_a_half_written_adapter_is_refused_unless_it_is_allowed(
    registry: Any, offline: Any, adapter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "half"
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, folder / "adapter_model.safetensors")
    code, error = registry.error("upload", str(folder), "--name", "half")
    assert code == 3
    (violation,) = error["violations"]
    assert (
        "--allow-missing" in violation["description"] and ".layers.1." in violation["description"]
    )
    (warning,) = registry.json("upload", str(folder), "--name", "half", "--allow-missing")[
        "warnings"
    ]
    assert "stay as they are" in warning["description"]
    assert offline.json("validate", str(folder))["warnings"] == [], "no base, nothing to compare"


def test_the_wrong_base_is_named_in_one_sentence(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "meta-llama/Llama-2-7b-hf"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    doubled = {
        name: np.repeat(tensor, 2, axis=1) if "lora_A" in name else np.repeat(tensor, 2, axis=0)
        for name, tensor in tensors.items()
    }
    save_file(doubled, folder / "adapter_model.safetensors")
    code, error = registry.error("upload", str(folder), "--name", "wrong")
    assert code == 3
    (violation,) = error["violations"]
    assert violation["field"] == "adapter_config.json:base_model_name_or_path"
    assert "was trained on meta-llama/Llama-2-7b-hf and was checked against" in error["message"]
    assert f"does not fit in {len(tensors)} tensors, such as" in error["message"]
