"""A registry as a real process with a state folder of its own, observed from outside."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.api.format_wire import geometry_to_proto
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.records import BaseRecord

_START_TIMEOUT_S = 300.0


class RegistryProcess:
    """A registry process with its embedded metadata server. An async context manager."""

    def __init__(self, state_dir: Path, cores: Sequence[int] | None = None) -> None:
        """`cores` pins it, and the metadata server that it starts, to these."""
        self._state_dir = state_dir
        self._cores = cores
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.client = RegistryClient(self.address, Credentials())

    async def __aenter__(self) -> Self:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        settings = {
            "LORAPLEX_STATE_DIR": str(self._state_dir),
            "LORAPLEX_REGISTRY_LISTEN": self.address,
            "LORAPLEX_DEBUG": "log-level=warning",
        }
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "loraplex_services.registry"], env={**kept, **settings}
        )
        self.process = psutil.Process(self._child.pid)
        if self._cores is not None:
            self.process.cpu_affinity(list(self._cores))
        deadline_s = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not await self._is_ready():
            assert self._child.poll() is None, "the registry must start"
            assert asyncio.get_running_loop().time() < deadline_s, "the registry must become ready"
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.client.__aexit__(kind, error, traceback)
        self._child.terminate()
        await asyncio.to_thread(self._child.wait)

    async def register(self, base: BaseRecord) -> None:
        """Make a base known."""
        message = pb.Base(base_id=base.base_id, geometry=geometry_to_proto(base.geometry))
        await self.client._stub.RegisterBase(pb.RegisterBaseRequest(base=message, replace=True))

    def forget_peak(self) -> None:
        """Begin a new measurement of `peak_bytes` (Linux)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that was resident at once since `forget_peak` (Linux)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError("no VmHWM in /proc; this measurement needs Linux")

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    async def _is_ready(self) -> bool:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="readiness")
            try:
                answer = await stub.Check(request, timeout=5)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
