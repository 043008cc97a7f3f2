"""Compiles the kernels: `python -m loraplex_services.worker.native.build`; `--all` for an image.

One shared library for each instruction set, in the virtual environment (or the user's cache), named
by a hash of the sources. The sources include no torch headers, so a build takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from loraplex_services.worker.native.isa import (
    ARM_BF16,
    ISA_FLAGS,
    TORCH,
    choose_isa,
    family_isas,
    host_isas,
)

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
ZIG = ("-m", "ziglang", "c++", "-mcpu=baseline")
"""Arguments of Python for the compiler of the package `ziglang`. Without `-mcpu` it would use every
instruction that this processor has, whatever the library is for."""
_ZIG_FLAGS = {ARM_BF16: "-mcpu=generic+v8_2a+bf16"}
"""Flags that this compiler spells differently."""
NO_COMPILER = (
    "there is no C++ compiler: install g++ or clang++, set CXX, or run "
    "`pip install 'loraplex[compiler]'`"
)
# Warnings are for developers; those of GCC 12 concern its own headers.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")
BUILD_TIMEOUT_S = 300


class BuildFailed(Exception):
    """Says why there is no library."""


def find_compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler: `CXX`, the first on the PATH, or that of `ziglang`."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (path := shutil.which(name)):
            return (path,)
    return (sys.executable, *ZIG) if importlib.util.find_spec("ziglang") else None


def find_library(isa: str) -> Path | None:
    """A library that was built from the present sources."""
    for folder in library_dirs():
        for path in sorted(folder.glob(f"loraplex-{isa}-{source_hash()}-*.so")):
            return path
    return None


def build_library(isa: str, tell: Callable[[str], None] = lambda progress: None) -> Path:
    """Compile for one instruction set and return the library's path; keeps one that is there.

    One process compiles at a time, with all its processors, and others wait for it. `tell` is
    called with lines of progress.

    Raises:
        BuildFailed: there are no sources, no compiler or no folder to write to, or the compiler
            failed.
    """
    if (path := find_library(isa)) is not None:
        return path
    if not (sources := sorted(SOURCE_DIR.glob("*.cpp"))):
        raise BuildFailed(f"the C++ sources are missing from {SOURCE_DIR}: reinstall loraplex")
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(NO_COMPILER)
    target = _writable_dir() / f"loraplex-{isa}-{source_hash()}-{_version_hash(compiler)}.so"
    with _alone_in(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.exists():
            return target
        built = Path(folder, target.name)
        tell(f"{isa}: compiling {len(sources)} sources, once")
        flags = ISA_FLAGS[isa]
        if compiler[1:] == ZIG:
            flags = tuple(_ZIG_FLAGS.get(flag, flag) for flag in flags)
        objects = _compile((*compiler, *FLAGS, *flags), sources, folder, isa, tell)
        tell(f"{isa}: linking")
        # Without the flags of an instruction set, so that zig builds its C++ library only once.
        _run(*compiler, *FLAGS, "-shared", *objects, "-o", str(built))
        built.replace(target)
    return target


def _compile(
    command: Sequence[str],
    sources: Sequence[Path],
    folder: str,
    isa: str,
    tell: Callable[[str], None],
) -> list[str]:
    """Compile all sources into `folder` and return the paths of the objects."""

    def compile_one(source: Path) -> str:
        compiled = str(Path(folder, source.name).with_suffix(".o"))
        _run(*command, "-c", str(source), "-o", compiled)
        return compiled

    objects = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, compiled in zip(sources, pool.map(compile_one, sources), strict=True):
            objects.append(compiled)
            tell(f"{isa}: compiled {source.name}, {len(objects)} of {len(sources)}")
    return objects


def library_dirs() -> list[Path]:
    """Folders that may hold libraries, best first."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [cache_home / "loraplex" / "native"]
    if sys.prefix != sys.base_prefix:
        folders.insert(0, Path(sys.prefix) / "lib" / "loraplex")
    return folders


@cache
def source_hash() -> str:
    """Hash of all sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS)).encode())
    for path in sorted(SOURCE_DIR.glob("*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. The system releases it even if the process dies."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: some compile twice
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _run(*command: str) -> None:
    # Zig caches what it builds, by default in the home directory, which may not be writable.
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(_writable_dir() / "zig")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            env={**caches, **os.environ},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not finish: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def _version_hash(compiler: Sequence[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S)
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
    which.add_argument("--best", type=int, metavar="N", help="for the N best of this machine's")
    which.add_argument("--isa", default="auto", help="one instruction set, instead of the best")
    args = parser.parse_args(argv)
    isas: Sequence[str] = (choose_isa(args.isa),)
    if args.all:
        isas = family_isas()
    elif args.best is not None:
        isas = host_isas()[: args.best]
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
