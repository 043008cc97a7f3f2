"""Writes a folder that appears complete or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def make_partial(folder: Path) -> Path:
    """A temporary folder on the file system of `folder`, which need not exist.

    It is next to `folder`, or inside it if that is a volume of its own: files cannot be renamed
    from one file system to another, and the one around a volume may be read-only.
    """
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and folder.stat().st_dev != parent.stat().st_dev:
        parent = folder
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))


def move_into(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`, or move its files into `folder` if that has content or is a
    volume. Names are synced as well, so a folder that exists after a crash of the machine is
    complete if its files were synced.
    """
    partial.chmod(0o755)
    changed = {folder.parent}
    _sync_folder(partial)
    try:
        os.rename(partial, folder)
    except OSError:
        for source in [path for path in partial.rglob("*") if path.is_file()]:
            target = folder / source.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
            changed.add(target.parent)
    for parent in changed:
        _sync_folder(parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
