"""Compile the kernels: `python -m services.worker.native.build`, with `--all` for an image.

One shared library for each instruction set, in the virtual environment (or the
user's cache), named by a hash of the sources. No torch headers, so a build takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from services.worker.native.isa import ISA_FLAGS, TORCH, choose_isa, family_isas

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
# Warnings are for developers; those of GCC 12 concern its own headers.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")
BUILD_TIMEOUT_S = 300


class BuildFailed(Exception):
    """Says why there is no library."""


def find_compiler() -> str | None:
    """`CXX`, or the first C++ compiler on the PATH."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    return None


def find_library(isa: str) -> Path | None:
    """A library that was built from the present sources."""
    for folder in library_dirs():
        for path in sorted(folder.glob(f"loraplex-{isa}-{source_hash()}-*.so")):
            return path
    return None


def build_library(isa: str) -> Path:
    """Compile for one instruction set and return the library's path; keeps one that is there.

    Raises:
        BuildFailed: without a compiler, without a place to write, or with the compiler's words.
    """
    if (path := find_library(isa)) is not None:
        return path
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler: none of CXX, {', '.join(COMPILERS)} is on the PATH")
    target = _writable_dir() / f"loraplex-{isa}-{source_hash()}-{_version_hash(compiler)}.so"
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as file:
        built = Path(file.name)
    try:
        _compile([compiler, *FLAGS, *ISA_FLAGS[isa]], built)
        built.chmod(0o755)
        built.replace(target)
    finally:
        built.unlink(missing_ok=True)
    return target


def library_dirs() -> list[Path]:
    """Where libraries may lie, best first."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [cache_home / "loraplex" / "native"]
    if sys.prefix != sys.base_prefix:
        folders.insert(0, Path(sys.prefix) / "lib" / "loraplex")
    return folders


@cache
def source_hash() -> str:
    """Of all sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS)).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: Sequence[str], target: Path) -> None:
    sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.cpp"))]
    try:
        done = subprocess.run(
            [*command, *sources, "-o", str(target)],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not finish: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def _version_hash(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S)
    return hashlib.sha256(done.stdout).hexdigest()[:8]


def _writable_dir() -> Path:
    for folder in library_dirs():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise BuildFailed(f"cannot write to {' or '.join(map(str, library_dirs()))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build what this machine uses by default, or what any of its family may use."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument(
        "--all",
        action="store_true",
        help="for every instruction set of this machine's family, not for its own best alone",
    )
    isas = family_isas() if parser.parse_args(argv).all else (choose_isa("auto"),)
    try:
        built = {isa: build_library(isa) for isa in isas if isa != TORCH}
    except BuildFailed as error:
        print(f"native kernels: {error}", file=sys.stderr)
        return 1
    for isa, path in built.items():
        print(f"native kernels: {isa}: {path}")
    if not built:
        print(f"native kernels: {TORCH} alone computes on this processor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
