"""Instruction sets: which ones this machine has, and which one the kernels use."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loraplex.errors import InvalidRequest

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")


class Level(NamedTuple):
    """One instruction set: how its library is compiled, and what computes what there."""

    flags: tuple[str, ...]
    processors: str
    half_wins: bool = False
    """Whether whole steps are faster in bfloat16 than in float32 over half-precision weights."""
    products: str = "float32 vectors"
    """The base's products in bfloat16; in float32, every level uses vectors of float32."""
    updates: str = "float32 vectors"
    """Low-rank updates of bfloat16 rows by bfloat16 adapters."""
    attention: str = "float32 vectors"
    """How attention over bfloat16 is computed."""


_PAIRS = "AVX-512 dot products"
_FASTER = f"{_PAIRS} or float32 vectors, whichever are faster"
LEVELS = {
    "amx": Level(
        (*_BF16, "-mamx-tile", "-mamx-bf16"),
        "Intel Sapphire Rapids and later Xeons",
        True,
        "AMX tiles",
        _FASTER,
        "AMX tiles",
    ),
    "avx512_bf16": Level(
        _BF16,
        "AMD Zen 4 and later, Intel Cooper Lake, Intel Xeons whose AMX is hidden",
        True,
        _FASTER,
        _FASTER,
        _PAIRS,
    ),
    "avx512": Level(_AVX512, "Intel Skylake-SP to Ice Lake"),
    "avx2": Level(("-mavx2", "-mfma", "-mf16c"), "other x86-64 since 2013"),
    "generic": Level(("-O1",), "any, only when asked for"),
}
"""Libraries that can be built, best first; `generic` is portable C++, slow unless the compiler is
good at it, and only used when asked for."""
ISA_FLAGS = {isa: level.flags for isa, level in LEVELS.items()}

_X86_64 = ("x86_64", "AMD64")
_LINUX_NAMES = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
}
_NEEDED = {
    isa: {
        _LINUX_NAMES.get(name, name)
        for name in (flag.removeprefix("-m") for flag in flags if flag.startswith("-m"))
    }
    for isa, flags in ISA_FLAGS.items()
}
AMX, GENERIC, TORCH = "amx", "generic", "torch"

_SYS_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA = 158, 0x1023, 18
"""Linux: a process asks once before it uses tile registers."""


@cache
def cpu_flags() -> frozenset[str]:
    """Features that the processor and the system offer; empty if Linux does not say."""
    if platform.machine() not in _X86_64:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def family_isas() -> tuple[str, ...]:
    """Libraries chosen by themselves on some processor of this machine's family, best first."""
    if platform.machine() not in _X86_64:
        return ()
    return tuple(isa for isa in ISA_FLAGS if isa != GENERIC)


def host_isas() -> tuple[str, ...]:
    """Libraries that run here, best first."""
    isas = (isa for isa, needed in _NEEDED.items() if needed <= cpu_flags())
    return tuple(isa for isa in isas if isa != AMX or may_use_tiles())


@cache
def may_use_tiles() -> bool:
    """Ask the system for AMX's tile registers, for all threads of this process."""
    try:
        answer: int = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA)
    except (OSError, AttributeError):
        return False
    return answer == 0


def has_amx() -> bool:
    """Whether bfloat16 products run on AMX tiles."""
    return AMX in host_isas()


def half_is_fast(wanted: str) -> bool:
    """Whether this processor computes steps faster in bfloat16 with the library for `wanted`.

    Torch's own bfloat16 products are faster than its float32 products on AMX only.

    Args:
        wanted: see `choose_isa`; one that this machine lacks is not.
    """
    isa = next(iter(host_isas()), TORCH) if wanted == "auto" else wanted
    if isa == TORCH:
        return has_amx()
    return isa in host_isas() and LEVELS[isa].half_wins


def choose_isa(wanted: str) -> str:
    """The library to use, or `torch`.

    Args:
        wanted: `auto`, `torch` or a name of ISA_FLAGS.

    Raises:
        InvalidRequest: when this machine cannot run it.
    """
    hosts = host_isas()
    if wanted == "auto":
        return TORCH if hosts[0] == GENERIC else hosts[0]
    if wanted == TORCH:
        return TORCH
    if wanted not in hosts:
        known = ", ".join(("auto", *hosts, TORCH))
        raise InvalidRequest.field(
            "cpu_isa", wanted, f"is not available on this machine; use {known}"
        )
    return wanted


def level_table() -> str:
    """What runs where, as docs/performance/cpu.md shows it."""
    head = ("level", "processors", "`auto` computes in", "products", "low-rank updates")
    rows = [[*head, "attention", "norms, gate, sampling"], ["---"] * 7]
    for isa, level in LEVELS.items():
        dtype = "bfloat16" if level.half_wins else "float32"
        paths = (level.products, level.updates, level.attention, "float32 vectors")
        rows.append([f"`{isa}`", level.processors, dtype, *paths])
    dtype = "float32; bfloat16 with AMX"
    rows.append([f"`{TORCH}`", "any, also aarch64", dtype, *["torch"] * 4])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(level_table(), end="")
