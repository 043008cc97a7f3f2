"""Runs the steps of `test_compilations` without a GPU: kernels are compiled, and launched nowhere.

    python -m tests.worker.ops.triton.no_device [--target 90]

Must run in a process without TRITON_INTERPRET. The worker's own launches decide what is compiled,
for the arguments that they have. The status is 1 if a step compiles anything after the start, and
an error ends the process if a kernel is not compiled or needs more shared memory than such a GPU
has. With another version of Triton in PYTHONPATH, this shows what will happen on its machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from loraplex_services.worker.runner import backends
from tests.worker.ops.triton.compilations import counted_compilations
from tests.worker.ops.triton.test_compilations import MAX_STEP_TOKENS, SETTINGS, Steps

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory of a program by compute capability, at most."""


class NoDevice:
    """What Triton asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.utils = self
        self.device = 0
        """Nothing is compiled yet for a device with a new number."""
        self.launches: Counter[str] = Counter()
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._capability]}

    def load_binary(self, name: str, kernel: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, and most threads."""
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *_: self.launches.update([metadata.name])


def zeros(draw: Any) -> Any:
    """`draw`, which launches, and token 0 in place of what was in memory."""
    return lambda *arguments: draw(*arguments).zero_()


def check(setting: tuple[str, str, str], root: Path) -> list[str]:
    """The kernels that steps compile after the start."""
    steps = Steps(root, *setting, device="cpu")
    runner = steps.runner
    runner._batches.gpu.idle.warm_up(MAX_STEP_TOKENS)
    draws = runner._chooser.draws
    runner._chooser.draws = draws._replace(draw=zeros(draws.draw), argmax=zeros(draws.argmax))
    with counted_compilations() as names:
        steps.run_all()
    return names


def main() -> int:
    """Run all settings; returns 1 if a step had to wait for the compiler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=int, choices=SHARED_BYTES, default=90)
    driver = NoDevice(parser.parse_args().target)
    triton.runtime.driver.set_active(driver)
    vars(backends)["INTERPRETING"] = True  # else Triton is refused on the device cpu
    status = 0
    for driver.device, setting in enumerate(SETTINGS):
        with tempfile.TemporaryDirectory() as folder:
            names = check(setting, Path(folder))
        print(*setting, f"compiled after the start: {names}", flush=True)
        status |= bool(names)
    print(f"Triton {triton.__version__}, {driver.launches.total()} launches: {driver.launches}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
