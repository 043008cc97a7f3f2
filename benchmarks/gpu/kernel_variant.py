"""A Triton kernel with one set of types and constants, compiled without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one set of types and constants."""

    name: str
    function: Any
    types: Mapping[str, str]
    """Triton's type of each run-time argument by name."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: Sequence[str] = field(default=())
    """Integer arguments that are multiples of 16."""
    max_registers: int | None = None
    """The most registers of a thread; None = the compiler's choice."""

    def compile(self, capability: int) -> Any:
        """Triton's compiled kernel for sm_`capability`; `asm["ptx"]`, `asm["cubin"]`."""
        names = list(self.function.arg_names)
        signature = {name: self.types.get(name, "constexpr") for name in names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in self.divisible or signature[name].startswith("*")
        }
        constants = dict(self.constants)
        if "EARLY" in names:
            constants["EARLY"] = capability >= 90
        source = ASTSource(self.function, signature, constants, attrs)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return triton.compile(
            source, target=GPUTarget("cuda", capability, WARP_THREADS), options=options
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one program."""

    num_registers: int
    """Registers of each thread."""
    spill_bytes: int
    """Stack of each thread."""
    shared_bytes: int


def resources(compiled: Any) -> Resources:
    """Read them from the machine code."""
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return Resources(usage["REG"], usage["STACK"], compiled.metadata.shared)
