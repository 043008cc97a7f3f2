"""Lists the objects of a file store, in the order of their keys."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from loraplex_services.common.objects.store import ObjectInfo

KEY_PART = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9._%~=+-]{0,254}")


def objects_below(root: Path, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
    """Objects whose keys begin with `prefix` and come after `after`. The folders that lead to them
    are not listed: one may have a name for each adapter of a tenant."""
    base = prefix[: prefix.rfind("/") + 1]
    parts = base.split("/")[:-1]
    if all(KEY_PART.fullmatch(part) for part in parts):
        yield from _walk(root.joinpath(*parts), base, prefix, after)


def _walk(folder: Path, base: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """Objects in and below `folder`, whose key is `base`."""
    try:
        # Names only: a folder may have a million of them, and each DirEntry has its path.
        names = sorted(
            entry.name + "/" * entry.is_dir(follow_symlinks=False)
            for entry in os.scandir(folder)
            if (base + entry.name).startswith(prefix) and KEY_PART.fullmatch(entry.name)
        )
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        key, path = base + name, folder / name
        if name.endswith("/"):
            if key > after or after.startswith(key):
                yield from _walk(path, key, prefix, after)
        elif key > after:
            with contextlib.suppress(FileNotFoundError):
                yield ObjectInfo(key, (stat := path.lstat()).st_size, stat.st_mtime)
