"""Instruction sets: which ones this machine has, and which one the kernels use."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loraplex.errors import InvalidRequest

_X86_64, _AARCH64 = ("x86_64", "AMD64"), ("aarch64",)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
ARM_BF16 = "-march=armv8.2-a+bf16"


class Level(NamedTuple):
    """One instruction set: how its library is compiled, and what computes what there."""

    flags: tuple[str, ...]
    processors: str
    machines: tuple[str, ...] = _X86_64
    """Values of `platform.machine()` of the processors."""
    prefers_half: bool = False
    """Whether complete steps are faster in bfloat16 than in float32 over half-precision weights."""
    products: str = "float32 vectors"
    """The base's products in bfloat16; in float32, every level uses vectors of float32."""
    updates: str = "float32 vectors"
    """Low-rank updates of bfloat16 rows by bfloat16 adapters."""
    attention: str = "float32 vectors"
    """How attention over bfloat16 is computed."""

    @property
    def has_dot_products(self) -> bool:
        """Whether there are dot products of bfloat16, or products of its tiles."""
        return any("bf16" in flag for flag in self.flags)


_FASTER = "dot products or float32 vectors, whichever are faster"
LEVELS = {
    "amx": Level(
        (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "Intel Sapphire Rapids and later Xeons",
        prefers_half=True,
        products="AMX tiles",
        updates="AMX tiles",
        attention="AMX tiles",
    ),
    "avx512_bf16": Level(
        _BF16,
        "AMD Zen 4 and later, Intel Cooper Lake, Intel Xeons whose AMX is hidden",
        prefers_half=True,
        products=_FASTER,
        updates=_FASTER,
        attention="dot products",
    ),
    "avx512": Level(_AVX512, "Intel Skylake-SP to Ice Lake"),
    "avx2": Level(
        ("-mavx2", "-mfma", "-mf16c"),
        "other x86-64 since 2013",
        prefers_half=True,
        products="16-bit integers",
    ),
    "neon_bf16": Level(
        (ARM_BF16,),
        "Linux on aarch64 with BF16 (Armv8.6): AWS Graviton 3, AmpereOne, NVIDIA Grace",
        _AARCH64,
        prefers_half=True,
        products=_FASTER,
        updates=_FASTER,
        attention="dot products",
    ),
    "neon": Level((), "Linux on other aarch64: AWS Graviton 2, Ampere Altra", _AARCH64),
}
"""Libraries that can be built, best first for each kind of machine."""
ISA_FLAGS = {isa: level.flags for isa, level in LEVELS.items()}

_LINUX_NAMES = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}


def _features(flags: tuple[str, ...]) -> set[str]:
    """Linux's names of the features that these flags enable."""
    if ARM_BF16 in flags:
        return {"bf16"}
    names = (flag.removeprefix("-m") for flag in flags if flag.startswith("-m"))
    return {_LINUX_NAMES.get(name, name) for name in names}


_NEEDED = {isa: _features(flags) for isa, flags in ISA_FLAGS.items()}
AMX, TORCH = "amx", "torch"

_SYS_ARCH_PRCTL, _REQUEST_FEATURE, _TILE_DATA = 158, 0x1023, 18
"""Linux: the request that a process makes once before it uses tile registers."""
_AT_HWCAP2, _HWCAP2_BF16 = 26, 1 << 14
"""Linux on aarch64: where a process finds what the processor has, and the bit for bfloat16."""


@cache
def cpu_flags() -> frozenset[str]:
    """Features that the processor and the system offer; empty if Linux does not say."""
    if platform.machine() in _AARCH64:
        return frozenset({"bf16"} if _auxiliary_value(_AT_HWCAP2) & _HWCAP2_BF16 else ())
    if platform.machine() not in _X86_64:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def _auxiliary_value(key: int) -> int:
    """A value of the auxiliary vector of this process; 0 if the system has none."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return 0
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    value: int = getauxval(key)
    return value


def family_isas() -> tuple[str, ...]:
    """Libraries for processors of this machine's family, best first."""
    return tuple(isa for isa in LEVELS if platform.machine() in LEVELS[isa].machines)


def host_isas() -> tuple[str, ...]:
    """Libraries that run here, best first."""
    isas = (isa for isa in family_isas() if _NEEDED[isa] <= cpu_flags())
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
    return isa in host_isas() and LEVELS[isa].prefers_half


def choose_isa(wanted: str) -> str:
    """The library to use, or `torch`.

    Args:
        wanted: `auto`, `torch` or a name of ISA_FLAGS.

    Raises:
        InvalidRequest: when this machine cannot run it.
    """
    hosts = (*host_isas(), TORCH)
    if wanted == "auto":
        return hosts[0]
    if wanted not in hosts:
        known = ", ".join(("auto", *hosts))
        raise InvalidRequest.field(
            "cpu_isa", wanted, f"is not available on this machine; use {known}"
        )
    return wanted


def level_table() -> str:
    """The table of levels in docs/performance/cpu.md."""
    head = ("level", "processors", "`auto` computes in", "products", "low-rank updates")
    rows = [[*head, "attention", "norms, gate, sampling"], ["---"] * 7]
    for isa, level in LEVELS.items():
        dtype = "bfloat16" if level.prefers_half else "float32"
        paths = (level.products, level.updates, level.attention, "float32 vectors")
        rows.append([f"`{isa}`", level.processors, dtype, *paths])
    dtype = "float32; bfloat16 with AMX"
    rows.append([f"`{TORCH}`", "any, also macOS", dtype, *["torch"] * 4])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(level_table(), end="")
