"""HAProxy with the settings of deploy/k8s/components/edge, between clients and services.

Without it, gRPC's server keeps the calls of connections that come and go until Python has taken
them, however many there are. These tests need `haproxy` (apt-get install haproxy).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import secrets
import shutil
import ssl
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.serving.http2_flood import flood
from benchmarks.serving.service_processes import PeakMemory, service_bytes
from demo.stack import running_stack
from loraplex.api.sampling import Sampling
from loraplex.client.inference_client import InferenceClient
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from tests.certificates import Authority
from tests.servers import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy (apt-get install)"),
]
REPO = Path(__file__).parents[2]
COMPONENT = REPO / "deploy" / "k8s" / "components" / "edge"
FLOOD_S = 6.0
NETWORKS = itertools.count(1)
MIB = 1 << 20


@dataclass(slots=True)
class Edge:
    """Ports of a running proxy, and the certificate of their CA."""

    http: int
    gateway: int
    registry: int
    ca: Path
    admin_key: str
    process: psutil.Process | None = None

    def resident_bytes(self) -> int:
        """Memory of the proxy."""
        assert self.process is not None, "started"
        return int(self.process.memory_info().rss)

    @property
    def tls(self) -> ssl.SSLContext:
        """What a client of the HTTP port uses."""
        return ssl.create_default_context(cafile=str(self.ca))

    def credentials(self, key: str = "") -> Credentials:
        """What clients of the gRPC ports use."""
        return Credentials(api_key=key or self.admin_key, ca=self.ca)

    def status(self, key: str, source: str) -> int:
        """The status of a list of models with a key, asked for from a loopback address."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.http, timeout=60, context=self.tls, source_address=(source, 0)
        )
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            return connection.getresponse().status

    def complete(self) -> str:
        """A completion over HTTP."""
        body = {"model": "upper", "prompt": "hello=", "max_tokens": 5, "temperature": 0}
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.http}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self.admin_key}"},
        )
        with urllib.request.urlopen(request, timeout=60, context=self.tls) as answer:
            return str(json.load(answer)["choices"][0]["text"])


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    admin_key = f"lpx_edge_{secrets.token_hex(16)}"
    (folder / "admin-key").write_text(admin_key)
    settings = {"LORAPLEX_AUTH": "keys", "LORAPLEX_ADMIN_KEY_FILE": str(folder / "admin-key")}
    with running_stack(REPO / "demo/base", "base", folder / "state", settings) as stack:
        asyncio.run(_publish(stack.registry, admin_key))
        house = Authority(folder / "house")
        made = Edge(free_port(), free_port(), free_port(), house.ca, admin_key)
        upstreams = {
            "EDGE_GATEWAY_HTTP": stack.http.removeprefix("http://"),
            "EDGE_GATEWAY": stack.grpc,
            "EDGE_REGISTRY": stack.registry,
        }
        proxy = _start(folder, made, house, upstreams)
        made.process = psutil.Process(proxy.pid)
        try:
            yield made
        finally:
            proxy.terminate()
            proxy.wait(10)


async def _publish(registry: str, admin_key: str) -> None:
    async with RegistryClient(registry, Credentials(api_key=admin_key)) as client:
        await client.upload(REPO / "demo/adapters/upper", Publication("upper"))


def _start(
    folder: Path, edge: Edge, house: Authority, upstreams: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Run the command of the manifest with its settings, its variables, and these addresses."""
    pair = house.issue("edge")
    shutil.copy(pair.key, f"{pair.cert}.key")
    [deployment] = [
        document
        for document in yaml.safe_load_all((COMPONENT / "edge.yaml").read_text())
        if document["kind"] == "Deployment"
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    health = free_port()
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    variables |= upstreams | {
        "EDGE_BIND": "127.0.0.1",
        "EDGE_CERT": str(pair.cert),
        "EDGE_HTTP_PORT": str(edge.http),
        "EDGE_GATEWAY_PORT": str(edge.gateway),
        "EDGE_REGISTRY_PORT": str(edge.registry),
        "EDGE_HEALTH_PORT": str(health),
        "EDGE_MAX_PODS": "1",  # an address takes the place of a name with one for each pod
    }
    command = [*container["command"][:-1], str(COMPONENT / "haproxy.cfg")]
    process = subprocess.Popen(command, env=os.environ | variables)
    while not _answers(f"http://127.0.0.1:{health}/healthz"):
        assert process.poll() is None, "haproxy did not start"
    return process


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _ordinary_calls(edge: Edge, until: asyncio.Task[object]) -> tuple[int, int]:
    """Make calls of a tenant to all three ports until a task ends; how many succeeded, and not."""
    counts = Counter[bool]()
    async with (
        InferenceClient(f"127.0.0.1:{edge.gateway}", edge.credentials()) as inference,
        RegistryClient(f"127.0.0.1:{edge.registry}", edge.credentials()) as registry,
    ):
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: registry.get("upper"),
            lambda: inference.complete("upper", "hello="),
            lambda: asyncio.to_thread(edge.complete),
        ]
        while not until.done() or counts.total() < 9:
            for call in calls:
                try:
                    await call()
                    counts[True] += 1
                except (LoraplexError, OSError):
                    counts[False] += 1
    return counts[True], counts[False]


@pytest.mark.hostile
@pytest.mark.parametrize("service", ["gateway", "registry"])
@pytest.mark.parametrize(
    ("num_hosts", "resets"), [(1, False), (1, True), (254, False), (254, True)]
)
def test_connections_that_open_streams_and_leave_take_a_bounded_part_of_memory(
    edge: Edge, service: str, num_hosts: int, resets: bool
) -> None:
    """Without the edge, they take hundreds of MiB a second. One address hinders nobody else."""
    tls = edge.tls
    tls.set_alpn_protocols(["h2"])
    port = edge.gateway if service == "gateway" else edge.registry
    network = next(NETWORKS)  # the edge remembers what addresses did
    hosts = [f"127.1.{network}.{number}" for number in range(1, num_hosts + 1)]

    async def attacked() -> tuple[int, int]:
        flooding = asyncio.create_task(flood(port, FLOOD_S, hosts, tls=tls, resets=resets))
        counts = await _ordinary_calls(edge, flooding)
        print(f"{flooding.result()}, ordinary calls: {counts}")
        assert flooding.result().streams > 1000
        return counts

    before = service_bytes()[service]
    with PeakMemory() as memory:
        num_served, num_failed = asyncio.run(attacked())
    print(f"{service} {before // MIB} -> {memory.peaks[service] // MIB} MiB")
    print(f"the edge {edge.resident_bytes() // MIB} MiB")
    assert memory.peaks[service] < before + 200 * MIB
    assert edge.resident_bytes() < 1024 * MIB, "the limit of its pod"
    assert num_served
    assert not num_failed or num_hosts > 1


@pytest.mark.hostile
def test_an_address_that_sends_wrong_keys_is_refused_before_the_services_count_them(
    edge: Edge,
) -> None:
    """They would count them for all clients of the proxy."""
    wrong = [edge.status(f"lpx_wrong{number}_{'s' * 20}", "127.0.2.1") for number in range(50)]
    assert wrong == sorted(wrong) and set(wrong) == {401, 429}
    assert edge.status(edge.admin_key, "127.0.2.1") == 429
    assert edge.status(f"lpx_other_{'s' * 20}", "127.0.2.2") == 401
    assert edge.status(edge.admin_key, "127.0.2.2") == 200


def test_uploads_watches_and_long_answers_pass_through(edge: Edge) -> None:
    async def used() -> list[str]:
        async with (
            RegistryClient(f"127.0.0.1:{edge.registry}", edge.credentials()) as registry,
            InferenceClient(f"127.0.0.1:{edge.gateway}", edge.credentials()) as inference,
        ):
            changes = aiter(registry.watch())
            await registry.upload(REPO / "demo/adapters/reverse", Publication("reverse"))
            while "reverse" not in str(await anext(changes)):
                pass
            sampling = Sampling(max_tokens=200, ignore_eos=True)
            return [chunk.text async for chunk in inference.generate("reverse", "abc=", sampling)]

    assert len(asyncio.run(used())) > 20
