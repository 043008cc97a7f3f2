"""A registry as a real process with a state folder of its own, observed from outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from loraplex.api.format_wire import geometry_to_proto
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.records import BaseRecord
from tests.registry import process

_START_TIMEOUT_S = 300.0


class RegistryProcess(process.RegistryProcess):
    """A registry process with its embedded metadata server. An async context manager."""

    def __init__(self, state_dir: Path, cores: Sequence[int] | None = None) -> None:
        """`cores` pins it, and the metadata server that it starts, to these."""
        super().__init__(state_dir, LORAPLEX_DEBUG="log-level=warning")
        state_dir.mkdir(parents=True, exist_ok=True)
        self._cores = cores
        self.client = RegistryClient(self.address, Credentials())

    async def __aenter__(self) -> Self:
        await self.start(wait=False)
        assert self.process is not None
        self._observed = psutil.Process(self.process.pid)
        if self._cores is not None:
            self._observed.cpu_affinity(list(self._cores))
        await self.until_ready(_START_TIMEOUT_S)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.client.__aexit__(*error)
        assert self.process is not None
        self.process.terminate()
        await self.wait()

    async def register(self, base: BaseRecord) -> None:
        """Make a base known."""
        message = pb.Base(base_id=base.base_id, geometry=geometry_to_proto(base.geometry))
        await self.client._stub.RegisterBase(pb.RegisterBaseRequest(base=message, replace=True))

    def forget_peak(self) -> None:
        """Begin a new measurement of `peak_bytes` (Linux)."""
        Path(f"/proc/{self._observed.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that was resident at once since `forget_peak` (Linux)."""
        for line in Path(f"/proc/{self._observed.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError("no VmHWM in /proc; this measurement needs Linux")

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        times = self._observed.cpu_times()
        return float(times.user + times.system)
