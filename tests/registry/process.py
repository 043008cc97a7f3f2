"""A registry as a real process: started, killed, started again on the same state."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.servers import free_address

START_TIMEOUT_S = 60.0


class RegistryProcess:
    """`python -m loraplex_services.registry` on a free port of loopback."""

    def __init__(self, state_dir: Path, **variables: str) -> None:
        self.address = free_address()
        self._log = state_dir.parent / f"{state_dir.name}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        self._environ = {
            **kept,
            "LORAPLEX_STATE_DIR": str(state_dir),
            "LORAPLEX_REGISTRY_LISTEN": self.address,
            **variables,
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *, wait: bool = True, **variables: str) -> None:
        """Start it, by default until it is ready."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loraplex_services.registry"),
                env={**self._environ, **variables},
                stdout=log,
                stderr=log,
            )
        if wait:
            await self.until_ready()

    async def until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the health service's `readiness`."""
        deadline = time.monotonic() + timeout_s
        while not await self.is_ready():
            assert self.process is not None
            assert self.process.returncode is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            await asyncio.sleep(0.05)

    async def is_ready(self) -> bool:
        """Ask once."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                request = health_pb2.HealthCheckRequest(service="readiness")
                answer = await stub.Check(request, timeout=2)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait(self) -> int:
        """The exit status."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), START_TIMEOUT_S)

    async def kill(self) -> None:
        """As if power were lost."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text()
