"""Compile the kernels: `python -m services.worker.native.build`, with `--all` for an image.

One shared library for each instruction set, in the virtual environment (or the
user's cache), named by a hash of the sources. No torch headers, so a build takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from services.worker.native.isa import (
    GENERIC,
    ISA_FLAGS,
    TORCH,
    choose_isa,
    family_isas,
    host_isas,
)

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
# Warnings are for developers; those of GCC 12 concern its own headers.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")
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


def build_library(isa: str, tell: Callable[[str], None] = lambda progress: None) -> Path:
    """Compile for one instruction set and return the library's path; keeps one that is there.

    One process compiles at a time, and others wait for it. `tell` hears of each source that is
    compiled.

    Raises:
        BuildFailed: without a compiler, without a place to write, or with the compiler's words.
    """
    if (path := find_library(isa)) is not None:
        return path
    if not (sources := sorted(SOURCE_DIR.glob("*.cpp"))):
        raise BuildFailed(f"the C++ sources are missing from {SOURCE_DIR}: reinstall loraplex")
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler: none of CXX, {', '.join(COMPILERS)} is on the PATH")
    target = _writable_dir() / f"loraplex-{isa}-{source_hash()}-{_version_hash(compiler)}.so"
    command = (compiler, *FLAGS, *ISA_FLAGS[isa])
    with _alone_in(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.exists():
            return target
        objects = [str(Path(folder, source.name).with_suffix(".o")) for source in sources]
        for number, (source, compiled) in enumerate(zip(sources, objects, strict=True), 1):
            _run(*command, "-c", str(source), "-o", compiled)
            tell(f"{isa}: compiled {source.name}, {number} of {len(sources)}")
        built = Path(folder, target.name)
        _run(*command, "-shared", *objects, "-o", str(built))
        built.replace(target)
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
    for path in sorted(SOURCE_DIR.glob("*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process, too."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: some compile twice
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
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
    """Build what this machine uses by default, or what it or any of its family may use."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--all",
        action="store_true",
        help="for every instruction set of this machine's family, not for its own best alone",
    )
    which.add_argument("--host", action="store_true", help="for every one that this machine has")
    which.add_argument("--isa", default="auto", help="one instruction set, instead of the best")
    args = parser.parse_args(argv)
    isas: Sequence[str] = (choose_isa(args.isa),)
    if args.all:
        isas = family_isas()
    elif args.host:
        isas = [isa for isa in host_isas() if isa != GENERIC]
    tell = partial(print, "native kernels:", flush=True)
    try:
        built = {isa: build_library(isa, tell) for isa in isas if isa != TORCH}
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
