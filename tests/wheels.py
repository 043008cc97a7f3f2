"""Builds the distribution's wheel from a copy of the tracked files, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("loraplex", "loraplex_services")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build into `folder`, which is made, and return the wheel's path."""
    tree = folder / "tree"
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=leave_out)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    code = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel
