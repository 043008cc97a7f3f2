"""Finds a base on this machine, for checks that may not use the network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.errors import InvalidRequest

if TYPE_CHECKING:
    from loraplex.adapter_format import Geometry


def given_folder(base: str) -> Path | None:
    """Folder of a base that a flag names; None for "". Raises as `base_folder`."""
    return base_folder(base, os.environ) if base else None


def geometry_of(base: str) -> Geometry | None:
    """Geometry of a base that a flag names; None for "". Raises as `base_folder`."""
    from loraplex.adapter_format import geometry_from_folder

    folder = given_folder(base)
    return None if folder is None else geometry_from_folder(folder)


def base_folder(base: str, environ: Mapping[str, str]) -> Path:
    """The folder of a base given as a folder or as the hub id of one in the local hub cache.

    Raises:
        InvalidRequest: it is neither.
    """
    if not base:
        raise InvalidRequest.field("--base", base, "is required, because the adapter names no base")
    found = found_base(base, environ)
    if found is not None:
        return found
    raise InvalidRequest.field(
        "--base", base, "is neither a folder nor in the local hub cache; give the base's folder"
    )


def found_base(base: str, environ: Mapping[str, str]) -> Path | None:
    """The same; None if it is neither."""
    folder = Path(base).expanduser()
    if base and folder.is_dir():
        return folder
    return _in_hub_cache(base, environ)


def _in_hub_cache(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None
