"""Only an adapter's own files are taken from a folder; everything else is refused by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from loraplex.adapter_format import File, read_folder, validate
from loraplex.errors import InvalidAdapter, InvalidRequest
from tests.adapter_format.builders import Adapter, refused, tiny_geometry, write


def test_a_folder_is_read_with_digests(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / ".gitattributes").write_text("*.safetensors filter=lfs")
    folder = read_folder(tmp_path)
    assert [file.path for file in folder.files] == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert folder.files[0] == File("README.md", 5, hashlib.sha256(b"hello").hexdigest())
    report = validate(
        folder.config_bytes,
        folder.header_prefix,
        folder.tensor_file_size,
        folder.files,
        tiny_geometry(),
    )
    assert report.num_modules == 4


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("adapter_model.bin", "pickle"),
        ("adapter_model.PT", "pickle"),
        ("optimizer.pth", "pickle"),
        ("weights.ckpt", "pickle"),
        ("state.pkl", "pickle"),
        ("arrays.npz", "pickle"),
        ("adapter.zip", "archive"),
        ("adapter.tar.gz", "archive"),
        ("train.py", "not a file of an adapter"),
        ("model.safetensors", "not a file of an adapter"),
        ("Adapter_config.json", "not a file of an adapter"),
        ("adapter_config.json ", "not a file of an adapter"),
        ("..config", "not a file of an adapter"),
    ],
)
def test_other_files_are_refused(name: str, problem: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_bytes(b"x")
    assert problem in refused(tmp_path)[name]


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["adapter_config.json", "generation_config.json", "README.md"])
def test_a_file_beyond_its_limit_is_refused_before_any_file_is_read(
    name: str, tmp_path: Path
) -> None:
    (write(tmp_path) / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # More than the machine has memory for.
    assert refused(tmp_path)[name] == "must have 1 to 1048576 bytes"


@pytest.mark.parametrize("target", ["/etc/hostname", "/nowhere", "README.md"])
def test_a_link_is_refused(target: str, tmp_path: Path) -> None:
    (write(tmp_path) / "README.md").symlink_to(target)
    assert "link" in refused(tmp_path)["README.md"]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(write(tmp_path) / "README.md")
    assert "regular file" in refused(tmp_path)["README.md"]


def test_a_named_adapter_in_a_sub_folder_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "poet").mkdir()
    write(tmp_path / "poet")
    assert str(tmp_path / "poet") in refused(tmp_path)["DIR"]


def test_all_named_adapters_of_a_folder_are_pointed_at(tmp_path: Path) -> None:
    """As TRL saves a trained model next to its reference."""
    for name in ("reference", "train"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    choice = f"give {tmp_path / 'reference'} or {tmp_path / 'train'}"
    assert refused(tmp_path)["DIR"].endswith(choice)


def test_the_last_checkpoint_is_pointed_at_whatever_else_is_there(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "a-folder-with-a-long-name"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    assert f"latest checkpoint is {tmp_path / 'checkpoint-10'}:" in refused(tmp_path)["DIR"]


def test_an_unknown_folder_is_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "stuff").mkdir()
    assert "flat" in refused(tmp_path)["stuff"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "adapter_model.safetensors" in refused(tmp_path)["DIR"]
    (write(tmp_path) / "adapter_config.json").unlink()
    assert set(refused(tmp_path)) == {"adapter_config.json"}


def test_a_truncated_tensor_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    assert "cut off" in refused(tmp_path)["adapter_model.safetensors"]


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        read_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ([("adapter_model.safetensors", 10, "0" * 64)], "adapter_config.json"),
        ([("adapter_config.json", 10, "0" * 64)], "adapter_model.safetensors"),
        ([("adapter_config.json", 0, "0" * 64)], "adapter_config.json"),
        ([("adapter_config.json", -1, "0" * 64)], "adapter_config.json"),
        ([("adapter_config.json", 2**40, "0" * 64)], "adapter_config.json"),
        ([("adapter_config.json", 10, "0" * 63)], "adapter_config.json:sha256"),
        ([("adapter_config.json", 10, "G" * 64)], "adapter_config.json:sha256"),
        ([("adapter_config.json", 10, "A" * 64)], "adapter_config.json:sha256"),
        ([("../adapter_config.json", 10, "0" * 64)], "../adapter_config.json"),
        ([("/etc/passwd", 10, "0" * 64)], "/etc/passwd"),
        ([("poet/adapter_config.json", 10, "0" * 64)], "poet/adapter_config.json"),
        ([("a\\adapter_config.json", 10, "0" * 64)], "a\\adapter_config.json"),
        ([("README.md\x00.bin", 10, "0" * 64)], "README.md\x00.bin"),
        ([("README.md", 10, "0" * 64)] * 2, "README.md"),
        ([("README.md", 2**21, "0" * 64)], "README.md"),
    ],
)
def test_a_wrong_file_list_is_refused(files: list[tuple[str, int, str]], field: str) -> None:
    adapter = Adapter()
    size = len(adapter.tensors)
    listed = [File(*file) for file in files]
    with pytest.raises(InvalidAdapter) as caught:
        validate(adapter.config, adapter.tensors, size, listed, tiny_geometry())
    assert field in {violation.field for violation in caught.value.violations}
