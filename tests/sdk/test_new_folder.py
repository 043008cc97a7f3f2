"""A new folder is complete, wherever it lies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.new_folder import make_partial, move_into


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on another file system than `tmp_path`."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def write(folder: Path) -> None:
    """As a command does that makes `folder`."""
    partial = make_partial(folder)
    (partial / "below").mkdir()
    (partial / "below" / "file").write_text("content")
    move_into(partial, folder)


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_becomes_the_complete_one(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "folder"
    if exists:
        folder.mkdir(parents=True)
    write(folder)
    assert files(tmp_path) == ["parent/folder/below/file"]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_with_content_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own").touch()
    write(folder)
    assert sorted(files(tmp_path)) == ["folder/below/file", "folder/own"]


def test_a_volume_is_filled_without_a_file_next_to_it(volume: Path, tmp_path: Path) -> None:
    """Renaming from one file system to another fails."""
    link = tmp_path / "volume"
    link.symlink_to(volume)
    partial = make_partial(link)
    assert partial.parent.samefile(volume)
    partial.rmdir()
    write(link)
    assert files(volume) == ["below/file"]
