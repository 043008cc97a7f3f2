"""Builds the wheels of the distributions from copies of the tracked files, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("loraplex", "loraplex_services")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def build_client_wheel(folder: Path) -> Path:
    """The wheel of `loraplex-client`, built into `folder`, which is made."""
    tree = folder / "tree"
    leave_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "client", tree, ignore=leave_out)
    return _built(tree)


def build_wheel(folder: Path) -> Path:
    """The wheel of `loraplex`, built into `folder`, which is made."""
    tree = folder / "tree"
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=leave_out)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return _built(tree)


def _built(tree: Path) -> Path:
    code = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    [wheel] = tree.parent.glob("*.whl")
    return wheel
