"""The runners that the parity suite judges, all on one device.

`pytest tests/worker/parity --device cuda` and `write_table --device cuda` choose it. The reference,
transformers + PEFT, stays on the CPU, whose float32 is IEEE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from loraplex_services.common.settings.env import CPU_ISA
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from tests.worker.loading import HOST_CACHE_BYTES

DEVICES = ("cpu", "cuda")
_device = "cpu"


def use_device(name: str) -> None:
    """Build the next runners on `cpu` or `cuda`."""
    global _device
    assert name in DEVICES, name
    _device = name


def device() -> str:
    """Where runners are built."""
    return _device


def parity_runner(folder: Path, *, dtype: str = "float32", **settings: Any) -> TorchRunner:
    """`build_runner` of a base on the device that was chosen, and with the instruction set of
    `LORAPLEX_CPU_ISA=...`."""
    settings.setdefault("cpu_isa", CPU_ISA.read(os.environ))
    settings.setdefault("host_cache_bytes", HOST_CACHE_BYTES)
    return build_runner(folder, device=_device, dtype=dtype, **settings)
