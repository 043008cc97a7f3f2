"""The overlay `dev` with the component `edge`: strangers attack it from the network of a pod.

HAProxy is the one of this machine (apt-get install haproxy) and runs as the manifest says.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.run import adapter_folders
from loraplex.client.settings import Credentials
from tests.certificates import Authority
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.network import run
from tests.deploy.cluster.test_cluster import Load, auth_secret, make_bucket, reaches, tool
from tests.deploy.kustomize import Document, render

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.hostile,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy (apt-get install)"),
]
REPO = Path(__file__).parents[3]
OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: loraplex
resources: [overlays/dev]
components: [components/edge]
"""
ATTACK_S = 20


def overlay(folder: Path) -> list[Document]:
    """What an operator adds the component to."""
    shutil.copytree(REPO / "deploy/k8s", folder / "k8s")
    shutil.copytree(REPO / "demo/base", folder / "demo/base")
    (folder / "k8s/kustomization.yaml").write_text(OVERLAY)
    return render(folder / "k8s")


@pytest.fixture(scope="module")
def admin_key() -> str:
    return tool("keys", "create", "--bootstrap", LORAPLEX_REGISTRY_ADDRESS="127.0.0.1:1").strip()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def cluster(
    admin_key: str, house: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    pair = house.issue("edge")
    files = {"tls.crt": pair.cert, "tls.key": pair.key}
    data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}
    secret = {"kind": "Secret", "metadata": {"name": "loraplex-tls-edge"}, "data": data}
    documents = [*overlay(tmp_path_factory.mktemp("desk")), auth_secret(admin_key), secret]
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(documents, folder) as running:
        running.wait(lambda: running.pods_of("s3")[0].is_ready)
        make_bucket(running)
        running.wait_ready()
        # The node knows the edge by the name in its certificate, in this mount namespace only.
        names = folder / "node-hosts"
        names.write_text(f"127.0.0.1 localhost\n{running.address('edge')} edge\n")
        run("mount", "--bind", str(names), "/etc/hosts")
        yield running
        run("umount", "/etc/hosts")


@pytest.fixture(scope="module")
def published(cluster: Cluster, admin_key: str, house: Authority) -> list[str]:
    environ = {
        "LORAPLEX_REGISTRY_ADDRESS": "edge:50052",
        "LORAPLEX_API_KEY": admin_key,
        "LORAPLEX_CA": str(house.ca),
    }
    for folder in adapter_folders():
        tool("upload", str(folder), "--name", f"default/{folder.name}", "--public", **environ)
    return [folder.name for folder in adapter_folders()]


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    cluster.network.add_pod("stranger")
    yield "stranger"
    cluster.network.remove_pod("stranger")


def test_strangers_reach_the_services_through_the_edge_only(
    cluster: Cluster, stranger: str
) -> None:
    assert [
        port for port in (443, 50051, 50052) if not reaches(cluster, stranger, "edge", port)
    ] == []
    for service, port in (("gateway", 50051), ("gateway", 8080), ("registry", 50052)):
        assert not reaches(cluster, stranger, service, port)


@pytest.mark.parametrize("attack", ["streams", "keys", "heads"])
def test_attacks_of_strangers_fail_no_request_of_others(
    cluster: Cluster,
    admin_key: str,
    house: Authority,
    published: list[str],
    stranger: str,
    attack: str,
) -> None:
    script = [sys.executable, "-m", "tests.deploy.cluster.strangers", attack]
    command = ["ip", "netns", "exec", stranger, *script, cluster.address("edge"), str(ATTACK_S)]
    with Load("edge:50051", Credentials(admin_key, house.ca), published) as load:
        cluster.wait(lambda: load.num_right >= 20 or load.faults, 60)
        before = load.num_right
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        during = load.num_right - before
        cluster.wait(lambda: load.num_right >= before + during + 20 or load.faults, 60)
    print(f"{attack}: {done.stdout.strip()} times, {during} requests were answered meanwhile")
    assert int(done.stdout) > 0
    assert during > 0
    assert load.faults == []
    assert {pod.name: pod.num_restarts for pod in cluster.pods if pod.num_restarts} == {}
