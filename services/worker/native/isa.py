"""Instruction sets: what this machine has, and which one the kernels use."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from loraplex.errors import InvalidRequest

ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": ("-O1",),
}
"""Libraries that can be built, best first; `generic` is portable C++, slow unless the compiler is
good at it, and only used when asked for."""

_NEEDED = {
    isa: {flag.removeprefix("-m") for flag in flags if flag.startswith("-m")}
    for isa, flags in ISA_FLAGS.items()
}
_AMX = {"amx_tile", "amx_bf16"}
GENERIC, TORCH = "generic", "torch"


@cache
def cpu_flags() -> frozenset[str]:
    """Features that the processor and the system offer; empty where Linux does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def host_isas() -> tuple[str, ...]:
    """Libraries that run here, best first."""
    return tuple(isa for isa, needed in _NEEDED.items() if needed <= cpu_flags())


def has_amx() -> bool:
    """Whether bfloat16 products run on AMX tiles."""
    return cpu_flags() >= _AMX


def choose_isa(wanted: str) -> str:
    """The library to use, or `torch`.

    Args:
        wanted: `auto`, `torch`, a name of ISA_FLAGS, or `amx`, which is avx512 plus the products
            that oneDNN runs on tiles.

    Raises:
        InvalidRequest: when this machine cannot run it.
    """
    hosts = host_isas()
    if wanted == "auto":
        return TORCH if hosts[0] == GENERIC else hosts[0]
    if wanted == TORCH:
        return TORCH
    runnable = (*hosts, "amx") if has_amx() and "avx512" in hosts else hosts
    if wanted not in runnable:
        known = ", ".join(("auto", *runnable, TORCH))
        raise InvalidRequest.field("cpu_isa", wanted, f"is not what this machine has; use {known}")
    return "avx512" if wanted == "amx" else wanted
