"""A real worker process on a Unix socket, and short calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.api.error_wire import from_detail
from loraplex.errors import LoraplexError
from loraplex.v1 import worker_pb2, worker_pb2_grpc
from loraplex_services.common.objects.opening import open_store
from tests.processes import processes_running
from tests.worker import tiny

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0


@dataclass
class WorkerProcess:
    """One worker with its own folders; `root` is short, because socket paths must be."""

    root: Path
    digests: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    python: str = sys.executable
    token: str = ""
    """What callers have to show."""

    @property
    def log(self) -> Path:
        """What the last process wrote to stderr."""
        return self.root / "log"

    @property
    def address(self) -> str:
        return f"unix:{self.root}/w.sock"

    def environment(self, **changes: str) -> dict[str, str]:
        own = {name: text for name, text in os.environ.items() if not name.startswith("LORAPLEX_")}
        return {
            **own,
            "OMP_NUM_THREADS": "1",
            "LORAPLEX_MODEL": str(self.root / "base"),
            "LORAPLEX_OBJECTS": f"file://{self.root}/objects",
            "LORAPLEX_WORKER_LISTEN": self.address,
            "LORAPLEX_STATE_DIR": str(self.root / "cache"),
            "LORAPLEX_KV_MEMORY": "4MiB",
            "LORAPLEX_DTYPE": "float32",
            "LORAPLEX_DEVICE": "cpu",
            "LORAPLEX_DEBUG": "log-format=text",
            **changes,
        }

    def start(self, **changes: str) -> None:
        """Start and return at once. The log goes into a file: nobody reads a pipe meanwhile, and a
        worker that has filled one stands still."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "loraplex_services.worker"],
                cwd=REPOSITORY,
                env=self.environment(**changes),
                stderr=log,
            )

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal and wait; exit code and log."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for the end; exit code and log."""
        assert self.process is not None
        code = self.process.wait(timeout=PATIENCE_S)
        return code, self.log.read_text(errors="replace")

    def engine(self) -> psutil.Process:
        """The engine process."""
        assert self.process is not None
        [engine] = processes_running(self.process.pid, "loraplex_services.worker.engine.process")
        return engine

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[worker_pb2_grpc.WorkerServiceStub]:
        """A stub of a ready worker."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            await until_health(channel, "readiness", health_pb2.HealthCheckResponse.SERVING)
            yield worker_pb2_grpc.WorkerServiceStub(channel)


async def until_health(channel: grpc.aio.Channel, service: str, wanted: int) -> list[int]:
    """Ask until the answer is `wanted`; all different answers in order."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                if answer.status not in seen:
                    seen.append(answer.status)
                if answer.status == wanted:
                    return seen
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def worker_folder() -> Iterator[WorkerProcess]:
    """A base and an empty object store in a short path; ends what still runs."""
    root = Path(tempfile.mkdtemp(prefix="lpx"))
    worker = WorkerProcess(root)
    try:
        tiny.write_base(root / "base")
        yield worker
    finally:
        if worker.process is not None and worker.process.poll() is None:
            worker.stop(signal.SIGKILL)
        shutil.rmtree(root)


async def publish_adapters(worker: WorkerProcess, names: Iterable[str]) -> None:
    """Put adapters of different shapes into the worker's store."""
    store = open_store(f"file://{worker.root}/objects")
    geometry = tiny.base_geometry(worker.root / "base")
    for index, name in enumerate(names):
        folder = tiny.write_adapter(worker.root / name, seed=index, rank=4 << (index % 3))
        worker.digests[name] = await tiny.publish(store, geometry, folder)
    await store.close()


def request(request_id: str, *digests: str, **sampling: object) -> worker_pb2.WorkerRequest:
    """A greedy request over a fixed prompt unless told otherwise."""
    prompt_ids = sampling.pop("prompt_ids", [5, 17, 23, 42])
    output_ids = sampling.pop("output_ids", [])
    fields = {"max_tokens": 8, "seed": 1, "ignore_eos": True, **sampling}
    return worker_pb2.WorkerRequest(
        request_id=request_id,
        tenant="t",
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        adapters=[worker_pb2.WorkerAdapter(digest=d, weight=1.0) for d in digests],
        sampling=worker_pb2.WorkerSampling(**fields),
    )


class SessionCall:
    """The gateway's end of a session."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceStub, token: str = "") -> None:
        metadata = [("authorization", f"Bearer {token}")] if token else None
        self._call = stub.Session(metadata=metadata)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}
        self.errors: dict[str, LoraplexError] = {}
        self.steps: list[int] = []
        self.epoch = 0

    async def open(self) -> SessionCall:
        hello = worker_pb2.SessionHello(gateway_id="test")
        await self._call.write(worker_pb2.SessionRequest(hello=hello))
        self.epoch = (await self._call.read()).welcome.epoch
        return self

    async def submit(self, *requests: worker_pb2.WorkerRequest) -> None:
        for message in requests:
            await self._call.write(worker_pb2.SessionRequest(submit=message))

    async def cancel(self, request_id: str) -> None:
        message = worker_pb2.SessionCancel(request_id=request_id)
        await self._call.write(worker_pb2.SessionRequest(cancel=message))

    async def step(self) -> worker_pb2.StepEvents:
        """Read one message. Raises grpc.RpcError when the stream ended with one."""
        message = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        assert message is not grpc.aio.EOF, "the session ended"
        events = message.events
        self.steps.append(events.step)
        for event in events.tokens:
            tokens = self.tokens.setdefault(event.request_id, [])
            assert event.output_position == len(tokens)
            tokens += event.token_ids
            if event.finish_reason:
                self.finished[event.request_id] = event.finish_reason
        for failure in events.failures:
            self.errors[failure.request_id] = from_detail(failure.error)
        return events

    async def until_ended(self, *request_ids: str) -> None:
        while not {*self.finished, *self.errors} >= set(request_ids):
            await self.step()

    def close(self) -> None:
        self._call.cancel()


async def until_status(
    stub: worker_pb2_grpc.WorkerServiceStub, holds: object
) -> worker_pb2.WatchStatusResponse:
    """The first status message for which `holds(message)` is true."""
    call = stub.WatchStatus(worker_pb2.WatchStatusRequest())
    async with asyncio.timeout(PATIENCE_S):
        async for message in call:
            if holds(message):
                call.cancel()
                return message
    raise AssertionError("the watch ended")
