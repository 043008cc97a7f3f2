"""Every service as a process of its own, with a link that can be disturbed between each two."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import boto3
import psutil

from loraplex import BlockingRegistry, Credentials, Publication
from loraplex.errors import LoraplexError
from loraplex_services.registry.index.metadata_server import find_binary
from tests.e2e.stack import BASE, BASE_ID, DEMO, REPO, clean_environment, eventually
from tests.faults.links import Link, Loop
from tests.s3_servers import moto
from tests.servers import free_port

NUM_WORKERS = 2
BUCKET = "loraplex"
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Spec:
    """How to start a process."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    log: Path
    root: Path = REPO
    """The checkout whose code it runs."""


class Service:
    """A process that a fault may kill, stop or starve."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        with self._spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._spec.command,
                env={**self._spec.environ, "PYTHONPATH": str(self._spec.root)},
                stdout=log,
                stderr=log,
                cwd=self._spec.root,
            )

    def replace(self, root: Path) -> None:
        """End it by SIGTERM and start it with the code of another checkout."""
        self.stop()
        self._spec = replace(self._spec, root=root)
        self.start()

    def kill(self) -> None:
        """SIGKILL, as the kernel sends it when memory is out; waits for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP to the process and its children."""
        for process in self._tree():
            process.suspend()

    def resume(self) -> None:
        """SIGCONT to all of them."""
        for process in self._tree():
            process.resume()

    def limit(self, resource: int, value: int) -> int:
        """Set a soft limit of the running process and its children; returns the one it had."""
        soft, _ = self._tree()[0].rlimit(resource)
        for process in self._tree():
            process.rlimit(resource, (value, process.rlimit(resource)[1]))
        return soft

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()

    def log(self) -> str:
        """What it wrote."""
        return self._spec.log.read_text(errors="replace")

    def last_lines(self) -> str:
        """The end of what it wrote, and whether it still runs."""
        code = None if self._process is None else self._process.poll()
        state = "runs" if code is None else f"ended with {code}"
        return "\n".join([*self.log().splitlines()[-8:], state])

    def _tree(self) -> list[psutil.Process]:
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


class Deployment:
    """A gateway, two workers, a registry, a metadata server and an object store.

    `links` maps "client-server" to the link between them; `services` maps names to processes.
    """

    def __init__(self, folder: Path, root: Path = REPO, faketime: Path | None = None) -> None:
        """
        Args:
            folder: for logs and state.
            root: the checkout whose code the services run at first.
            faketime: libfaketime, with which `set_clock` can change clocks.
        """
        self._folder, self._root, self._faketime = folder, root, faketime
        self._loop = Loop()
        self._moto = moto()
        self.links: dict[str, Link] = {}
        self.services: dict[str, Service] = {}
        self._http_port = free_port()
        self._registry_port = free_port()

    @property
    def http(self) -> str:
        """The gateway's HTTP address."""
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def registry(self) -> str:
        """The registry's own address: publishers do not pass a link."""
        return f"127.0.0.1:{self._registry_port}"

    def __enter__(self) -> Self:
        store = self._moto.__enter__()
        boto3.client(
            "s3",
            endpoint_url=store["AWS_ENDPOINT_URL_S3"],
            region_name=store["AWS_DEFAULT_REGION"],
            aws_access_key_id=store["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=store["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=BUCKET)
        self._compose(store)
        try:
            for service in self.services.values():
                service.start()
            eventually(self.is_ready, _START_TIMEOUT_S)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for service in reversed(self.services.values()):
            service.stop()
        for link in self.links.values():
            link.close()
        self._loop.stop()
        self._moto.__exit__(kind, error, trace)

    def set_clock(self, service: str, offset_s: int) -> None:
        """Have the wall clock of a service and its children differ from now on."""
        assert self._faketime is not None
        self._clock_of(service).write_text(f"{offset_s:+d}")

    def publish_folders(self, folders: Iterable[Path]) -> None:
        """Upload adapters under the names of their folders."""
        with BlockingRegistry(self.registry, Credentials()) as registry:
            for folder in folders:
                registry.upload(folder, Publication(folder.name))

    def publish(self, skills: Iterable[str]) -> None:
        """Upload demo adapters under their own names."""
        self.publish_folders(DEMO / "adapters" / skill for skill in skills)

    def is_ready(self) -> bool:
        """Whether the registry answers, and the gateway is ready with every worker."""
        return not self.missing()

    def missing(self) -> str:
        """Why it is not ready; "" if it is."""
        num_ready = self._gauge("loraplex_gateway_ready_workers")
        if num_ready != NUM_WORKERS:
            return f"{num_ready:.0f} of {NUM_WORKERS} workers are ready"
        try:
            with BlockingRegistry(self.registry, Credentials()) as registry:
                next(iter(registry.list()), None)
        except LoraplexError as error:
            return f"the registry does not answer: {error.message}"
        return ""

    def evidence(self) -> str:
        """The last lines of each log, for a violation that nobody watched."""
        return "\n".join(f"--- {name}\n{each.last_lines()}" for name, each in self.services.items())

    def _gauge(self, name: str) -> float:
        try:
            with urllib.request.urlopen(f"{self.http}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
        except (OSError, urllib.error.URLError):
            return 0.0
        found = [line.split()[-1] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return float(found[0]) if found else 0.0

    def _compose(self, store: Mapping[str, str]) -> None:
        store_port = int(store["AWS_ENDPOINT_URL_S3"].rsplit(":", 1)[1])
        metadata_port = free_port()
        self._add("metadata", (
            str(find_binary()), "--port", str(metadata_port), "--save", "",
            "--dir", str(self._folder), "--maxmemory-policy", "noeviction",
        ), {})  # fmt: skip
        for client in ("registry", "gateway"):
            self._link(f"{client}-metadata", metadata_port)
        for client in ("registry", "worker"):
            self._link(f"{client}-store", store_port)
        self._service("registry", "registry", {
            "LORAPLEX_REGISTRY_LISTEN": self.registry,
            "LORAPLEX_STATE_DIR": str(self._folder / "registry"),
            **self._metadata_of("registry"),
            **self._store_of("registry", store),
        })  # fmt: skip
        workers = [self._worker(number, store) for number in range(NUM_WORKERS)]
        self._link("gateway-registry", self._registry_port)
        self._service("gateway", "gateway", {
            "LORAPLEX_HTTP_LISTEN": f"127.0.0.1:{self._http_port}",
            "LORAPLEX_GATEWAY_LISTEN": f"127.0.0.1:{free_port()}",
            "LORAPLEX_REGISTRY_ADDRESS": self.links["gateway-registry"].address,
            "LORAPLEX_WORKERS": ",".join(workers),
            **self._metadata_of("gateway"),
        })  # fmt: skip

    def _worker(self, number: int, store: Mapping[str, str]) -> str:
        """Add a worker; returns the address of the gateway's link to it."""
        port = free_port()
        self._service(f"worker-{number}", "worker", {
            "LORAPLEX_WORKER_LISTEN": f"127.0.0.1:{port}",
            "LORAPLEX_MODEL": str(BASE),
            "LORAPLEX_SERVED_MODEL_NAME": BASE_ID,
            "LORAPLEX_DTYPE": "float32",
            "LORAPLEX_KV_MEMORY": "64MiB",
            "LORAPLEX_STATE_DIR": str(self._folder / f"worker-{number}"),
            "OMP_NUM_THREADS": "1",
            **self._store_of("worker", store),
        })  # fmt: skip
        return self._link(f"gateway-worker-{number}", port).address

    def _metadata_of(self, client: str) -> dict[str, str]:
        return {"LORAPLEX_METADATA": f"redis://{self.links[f'{client}-metadata'].address}/0"}

    def _store_of(self, client: str, store: Mapping[str, str]) -> dict[str, str]:
        endpoint = {"AWS_ENDPOINT_URL_S3": f"http://{self.links[f'{client}-store'].address}"}
        return {**store, **endpoint, "LORAPLEX_OBJECTS": f"s3://{BUCKET}/prefix"}

    def _link(self, name: str, target: int) -> Link:
        link = self.links[name] = Link(self._loop, target)
        return link

    def _service(self, name: str, module: str, settings: Mapping[str, str]) -> None:
        self._add(name, (sys.executable, "-m", f"loraplex_services.{module}"), settings)

    def _add(self, name: str, command: tuple[str, ...], settings: Mapping[str, str]) -> None:
        environ = {**clean_environment(), **settings}
        environ.pop("AWS_ENDPOINT_URL", None)
        log = self._folder / f"{name}.log"
        if self._faketime is not None:
            environ |= {
                "LD_PRELOAD": str(self._faketime),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock_of(name)),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            self.set_clock(name, 0)
        self.services[name] = Service(name, Spec(command, environ, log, self._root))

    def _clock_of(self, service: str) -> Path:
        return self._folder / f"{service}.clock"


def wait_s(seconds: float) -> None:
    """Let a fault last."""
    time.sleep(seconds)
