"""The `dev` overlay, run: real processes from the images, in network namespaces with policies."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from demo.run import GREEDY, Question, adapter_folders, questions
from loraplex.client.inference_client import InferenceClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.network import run
from tests.deploy.kustomize import Document, render

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
OVERLAYS = Path(__file__).parents[3] / "deploy/k8s/overlays"
NUM_ASKING = 4
PATIENCE_S = 30.0


def tool(*arguments: str, **environ: str) -> str:
    """Output of the `registry` command, run on the node."""
    done = subprocess.run(
        [sys.executable, "-m", "loraplex.cli.registry", *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def auth_secret(admin_key: str) -> Document:
    """The Secret that an operator makes before anything is applied."""
    names = ("service-token", "metadata-password")
    values = {"admin-key": admin_key} | {name: secrets.token_hex(32) for name in names}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in values.items()}
    return {"kind": "Secret", "metadata": {"name": "loraplex-auth"}, "data": data}


@pytest.fixture(scope="module")
def admin_key() -> str:
    """Made as the install page says, while no registry answers."""
    return tool("keys", "create", "--bootstrap", LORAPLEX_REGISTRY_ADDRESS="127.0.0.1:1").strip()


@pytest.fixture(scope="module")
def cluster(admin_key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    documents = [*render(OVERLAYS / "dev"), auth_secret(admin_key)]
    with Cluster(documents, tmp_path_factory.mktemp("cluster")) as running:
        running.wait(lambda: running.pods_of("s3")[0].is_ready)
        make_bucket(running)
        running.wait_ready()
        yield running


def make_bucket(cluster: Cluster) -> None:
    """What the init container of the S3 server's image does."""
    boto3.client(
        "s3",
        endpoint_url=f"http://{cluster.address('s3')}:9000",
        aws_access_key_id="loraplex-dev",
        aws_secret_access_key="loraplex-dev-secret",
        region_name="us-east-1",
    ).create_bucket(Bucket="loraplex")


@pytest.fixture(scope="module")
def published(cluster: Cluster, admin_key: str) -> list[str]:
    address = f"{cluster.address('registry')}:50052"
    environ = {"LORAPLEX_REGISTRY_ADDRESS": address, "LORAPLEX_API_KEY": admin_key}
    for folder in adapter_folders():
        tool("upload", str(folder), "--name", f"default/{folder.name}", "--public", **environ)
    return [folder.name for folder in adapter_folders()]


class Load:
    """Clients that ask the bundled adapters without a pause and check every answer."""

    def __init__(self, target: str, credentials: Credentials, adapters: list[str]) -> None:
        self.num_right = 0
        self.faults: list[str] = []
        self._target = target
        self._credentials = credentials
        self._questions = questions(adapters)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    async def _run(self) -> None:
        async with InferenceClient(self._target, self._credentials) as client:
            parts = [self._questions[i::NUM_ASKING] for i in range(NUM_ASKING)]
            await asyncio.gather(*(self._ask_all(client, part) for part in parts))

    async def _ask_all(self, client: InferenceClient, part: list[Question]) -> None:
        while not self._ends.is_set():
            for question in part:
                await self._ask(client, question)

    async def _ask(self, client: InferenceClient, question: Question) -> None:
        reference = f"default/{question.adapter}"
        try:
            text = await _text(client, reference, question.prompt)
        except (LoraplexError, TimeoutError) as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return
        if text == question.expected:
            self.num_right += 1
        else:
            self.faults.append(f"{question} answered {text!r}")


@pytest.fixture
def load(cluster: Cluster, admin_key: str, published: list[str]) -> Iterator[Load]:
    target = f"{cluster.address('gateway')}:50051"
    with Load(target, Credentials(admin_key), published) as asking:
        cluster.wait(lambda: asking.num_right >= 20 or asking.faults, 60)
        yield asking
        asked = asking.num_right
        cluster.wait(lambda: asking.num_right >= asked + 20 or asking.faults, 60)
    assert asking.faults == []


def reaches(cluster: Cluster, pod: str, service: str, port: int) -> bool:
    """Whether a connection from inside a pod's network opens."""
    target = cluster.address(service) or cluster.pods_of(service)[0].address
    command = ["ip", "netns", "exec", pod, "nc", "-z", "-w", "2", target, str(port)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_every_pod_becomes_ready_without_a_restart(cluster: Cluster) -> None:
    names = [pod.name.partition("-")[0] for pod in cluster.pods]
    assert sorted(set(names)) == ["gateway", "registry", "s3", "valkey", "worker"]
    assert {pod.name: pod.num_restarts for pod in cluster.pods if pod.num_restarts} == {}


def test_every_adapter_answers_right_through_the_services(load: Load) -> None:
    assert load.faults == []


def test_only_the_connections_of_the_architecture_are_open(cluster: Cluster) -> None:
    [gateway, *_] = [pod.name for pod in cluster.pods_of("gateway")]
    [worker, *_] = [pod.name for pod in cluster.pods_of("worker")]
    [registry, *_] = [pod.name for pod in cluster.pods_of("registry")]
    address = cluster.network.add_pod("stranger")
    assert address
    try:
        allowed = [
            (gateway, "worker", 50053),
            (gateway, "registry", 50052),
            (gateway, "valkey", 6379),
            (gateway, "s3", 9000),
            (registry, "valkey", 6379),
            (registry, "s3", 9000),
            (worker, "s3", 9000),
            ("stranger", "gateway", 8080),
            ("stranger", "registry", 50052),
        ]
        denied = [
            (worker, "valkey", 6379),
            (worker, "registry", 50052),
            (worker, "gateway", 8080),
            ("stranger", "worker", 50053),
            ("stranger", "valkey", 6379),
            ("stranger", "s3", 9000),
        ]
        assert [arrow for arrow in allowed if not reaches(cluster, *arrow)] == []
        assert [arrow for arrow in denied if reaches(cluster, *arrow)] == []
    finally:
        cluster.network.remove_pod("stranger")


def test_the_root_file_system_of_a_pod_is_read_only(cluster: Cluster) -> None:
    for name in ("registry", "gateway", "worker"):
        root = cluster.pods_of(name)[0].root
        with pytest.raises(OSError, match="Read-only file system"):
            (root / "opt/loraplex/written").write_text("")


def test_a_killed_worker_fails_no_request(cluster: Cluster, load: Load) -> None:
    victim = cluster.pods_of("worker")[0]
    victim.kill()
    cluster.wait(lambda: victim.num_restarts == 1)
    cluster.wait_ready("worker")


def test_a_killed_gateway_fails_only_its_own_streams(cluster: Cluster, load: Load) -> None:
    victim = cluster.pods_of("gateway")[0]
    victim.kill()
    cluster.wait(lambda: victim.num_restarts == 1)
    cluster.wait_ready("gateway")
    lost = [fault for fault in load.faults if "Unavailable" in fault]
    assert len(lost) <= NUM_ASKING and load.faults == lost
    load.faults.clear()


@pytest.mark.parametrize("deployment", ["worker", "registry"])
def test_a_rolling_update_fails_no_request(cluster: Cluster, load: Load, deployment: str) -> None:
    before = {pod.name for pod in cluster.pods_of(deployment)}
    cluster.roll_out(deployment)
    after = {pod.name for pod in cluster.pods_of(deployment)}
    assert len(after) == len(before) and not before & after


def test_workers_scale_up_and_down_under_load(cluster: Cluster, load: Load) -> None:
    cluster.scale("worker", 3)
    cluster.scale("worker", 1)
    cluster.scale("worker", 2)


def test_requests_go_on_without_the_metadata_server(cluster: Cluster, load: Load) -> None:
    [valkey] = cluster.pods_of("valkey")
    valkey.kill()
    cluster.wait(lambda: valkey.num_restarts == 1)
    cluster.wait_ready("valkey", "registry", "gateway")


def test_requests_go_on_without_the_object_store(cluster: Cluster, load: Load) -> None:
    [store] = cluster.pods_of("s3")
    store.pause()
    try:
        asked = load.num_right
        cluster.wait(lambda: load.num_right >= asked + 100 or load.faults, 60)
    finally:
        store.resume()
    cluster.wait_ready("registry", "gateway")


def test_a_moved_tag_reaches_every_gateway(
    cluster: Cluster, admin_key: str, published: list[str]
) -> None:
    environ = {
        "LORAPLEX_REGISTRY_ADDRESS": f"{cluster.address('registry')}:50052",
        "LORAPLEX_API_KEY": admin_key,
    }
    wanted = next(question for question in questions(published) if question.adapter == "reverse")
    for version in ("upper", "reverse"):
        folder = next(path for path in adapter_folders() if path.name == version)
        tool("upload", str(folder), "--name", "default/moving", "--tag", version, **environ)
    tool("tag", "default/moving:upper", "live", **environ)
    assert _answer(cluster, admin_key, "default/moving:live", wanted.prompt) != wanted.expected
    tool("tag", "default/moving:reverse", "live", **environ)

    def moved() -> bool:
        answers = {
            _answer(cluster, admin_key, "default/moving:live", wanted.prompt, pod.address)
            for pod in cluster.pods_of("gateway")
        }
        return answers == {wanted.expected}

    cluster.wait(moved, 10)


def _answer(
    cluster: Cluster, key: str, reference: str, prompt: str, gateway: str | None = None
) -> str:
    async def ask() -> str:
        target = f"{gateway or cluster.address('gateway')}:50051"
        async with InferenceClient(target, Credentials(key)) as client:
            return await _text(client, reference, prompt)

    return asyncio.run(ask())


async def _text(client: InferenceClient, reference: str, prompt: str) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return (await client.complete(reference, prompt, GREEDY)).text


def test_pods_end_by_themselves_within_their_grace_period(cluster: Cluster) -> None:
    for name in ("gateway", "registry", "worker"):
        pod = cluster.add_pod(name)
        cluster.wait(lambda pod=pod: pod.is_ready)
        cluster.remove_pod(pod)
        assert pod.exit_status == 0, pod.log()[-2000:]
        assert "Traceback" not in pod.log()
    assert run("ip", "netns", "list")
