"""A gateway with real sockets between scripted neighbours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from loraplex.v1 import admin_pb2, admin_pb2_grpc
from loraplex_services.common.security.tls import PLAIN, TlsFiles
from loraplex_services.common.telemetry.tracing import Tracer
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.config import GatewayConfig
from loraplex_services.gateway.gateway import Gateway
from tests.gateway.http.documented import check_exchange
from tests.gateway.scripted_registry import ScriptedRegistry, start_registry
from tests.gateway.scripted_worker import ScriptedWorker, start_worker


@dataclass
class Stack:
    """What one test runs. Workers are given before `start`, or added by address."""

    folder: Path
    workers: list[ScriptedWorker]
    registry: ScriptedRegistry = field(default_factory=ScriptedRegistry)
    gateway: Gateway | None = None
    servers: dict[str, grpc.aio.Server] = field(default_factory=dict)
    max_request_s: float = 60.0
    wants_keys: bool = False
    objects_url: str = ""
    gateway_id: str = "g0"
    http_tls: TlsFiles = PLAIN
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    tracer: Tracer | None = None
    client: AsyncOpenAI | None = None
    registry_folder: Path | None = None
    """Where the socket of somebody else's registry is."""

    def worker_address(self, worker_id: str) -> str:
        """Its socket."""
        return f"unix:{self.folder}/{worker_id}.sock"

    @property
    def registry_address(self) -> str:
        """Its socket."""
        return f"unix:{self.registry_folder or self.folder}/registry.sock"

    async def start(self, *, ready: bool = True, others: tuple[str, ...] = ()) -> None:
        """Start everything; with `ready` wait until all of it is.

        `others` are ids of workers that somebody else runs.
        """
        self.servers["registry"] = await start_registry(self.registry, self.registry_address)
        for worker in self.workers:
            await self.start_worker(worker)
        worker_ids = [*(worker.worker_id for worker in self.workers), *others]
        await self.start_gateway(worker_ids)
        if ready:
            await eventually(lambda: self.running.readiness.missing() == "")
            await self.until_ready(len(worker_ids))

    async def until_ready(self, num_workers: int) -> None:
        """Wait until just that many workers take new requests."""
        while True:
            workers = (await self.status()).workers
            if sum(worker.ready and not worker.draining for worker in workers) == num_workers:
                return
            await asyncio.sleep(0.02)

    async def start_worker(self, worker: ScriptedWorker) -> None:
        """Serve a worker at its address."""
        address = self.worker_address(worker.worker_id)
        self.servers[worker.worker_id] = await start_worker(worker, address)

    async def start_gateway(self, worker_ids: list[str]) -> None:
        """Start the gateway in this process, on free ports."""
        self.gateway = Gateway(
            GatewayConfig(
                grpc_listen=f"unix:{self.folder}/gateway.sock",
                http_listen="127.0.0.1:0",
                metrics_listen="",
                registry_address=self.registry_address,
                workers=tuple(map(self.worker_address, worker_ids)),
                max_request_s=self.max_request_s,
                drain_s=5.0,
                allowed_hosts=(),
                auth="keys" if self.wants_keys else "off",
                admission=self.admission,
                http_tls=self.http_tls,
                service_token="scripted" if self.wants_keys else "",
                gateway_id=self.gateway_id,
                objects_url=self.objects_url,
            ),
            tracer=self.tracer,
        )
        await self.gateway.start()

    async def stop_server(self, name: str) -> None:
        """Cut a neighbour off, its streams included."""
        await self.servers.pop(name).stop(None)

    async def stop(self) -> None:
        """Stop everything."""
        if self.client is not None:
            await self.client.close()
        if self.gateway is not None:
            await self.gateway.drain(1.0)
            await self.gateway.grpc.stop(0)
            await self.gateway.close()
        for name in list(self.servers):
            await self.stop_server(name)

    @property
    def running(self) -> Gateway:
        """The gateway, after `start`."""
        assert self.gateway is not None
        return self.gateway

    @property
    def url(self) -> str:
        """Root of the HTTP API."""
        scheme = "https" if self.http_tls.cert else "http"
        return f"{scheme}://127.0.0.1:{self.running.http_port}"

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC API."""
        return f"unix:{self.folder}/gateway.sock"

    async def status(self) -> admin_pb2.GetStatusResponse:
        """The stack as the gateway sees it."""
        async with grpc.aio.insecure_channel(self.grpc_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            request = admin_pb2.GetStatusRequest(include_adapters=True)
            return await stub.GetStatus(request)

    def openai(self) -> AsyncOpenAI:
        """The official client; `stop` closes it. All that it exchanges is checked against the
        OpenAPI document."""
        if self.client is None:
            transport = DefaultAsyncHttpxClient(event_hooks={"response": [check_exchange]})
            self.client = AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=transport
            )
        return self.client


async def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """To read the system's certificates takes each client of HTTP 20 ms, and none needs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


@pytest.fixture
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack with one worker; tests change it and call `start`."""
    made = Stack(tmp_path_factory.mktemp("s"), [ScriptedWorker()])
    yield made
    await made.stop()
