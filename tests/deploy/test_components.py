"""Components that no overlay of ours uses build on the overlays they name, and are valid there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from loraplex_services.common.settings import variables
from tests.deploy.kustomize import Document, render
from tests.metrics import exported

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
BUILT_ON = {
    "edge": "prod-cpu",
    "keda": "prod-cpu",
    "private-ca": "prod-cpu",
    "tensor-parallel": "prod-gpu",
    "tensor-parallel-nodes": "prod-gpu",
}
CUSTOM = {"ScaledObject"}
"""Kinds that Kubernetes itself does not know."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the manifests, for overlays of an operator's own."""
    shutil.copytree(K8S, tmp_path / "k8s")
    return tmp_path / "k8s"


def operators_overlay(folder: Path, component: str) -> Path:
    """An overlay that adds the component."""
    mine = folder / "overlays" / "mine"
    mine.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "loraplex",
        "resources": [f"../{BUILT_ON[component]}"],
        "components": [f"../../components/{component}"],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return mine


def worker_of(documents: list[Document]) -> Document:
    """The workers' Deployment."""
    [found] = [
        each
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "worker")
    ]
    return found


def test_every_component_is_in_an_overlay_or_tried_here() -> None:
    used = "".join(path.read_text() for path in K8S.glob("overlays/*/kustomization.yaml"))
    names = {path.name for path in (K8S / "components").iterdir()}
    unused = {name for name in names if f"components/{name}\n" not in used}
    assert unused == set(BUILT_ON)


@pytest.mark.parametrize("component", BUILT_ON)
def test_a_component_builds_and_is_valid(folder: Path, component: str) -> None:
    for document in render(operators_overlay(folder, component)):
        assert (
            document["metadata"].get("namespace") == "loraplex" or document["kind"] == "Namespace"
        )
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("component", BUILT_ON)
def test_rendering_equals_kubectl(folder: Path, component: str) -> None:
    overlay = operators_overlay(folder, component)
    out = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, check=True)
    theirs = filter(None, yaml.safe_load_all(out.stdout))
    assert {_name(each): each for each in theirs} == {_name(each): each for each in render(overlay)}


def _name(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_keda_asks_for_series_that_are_served_and_alone_sets_the_replicas(folder: Path) -> None:
    documents = render(operators_overlay(folder, "keda"))
    assert "replicas" not in worker_of(documents)["spec"]
    assert not [each for each in documents if each["kind"] == "HorizontalPodAutoscaler"]
    [scaled] = [each for each in documents if each["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == "worker"
    served = {metric.name for metric in exported()}
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert {re.findall(r"\(([\w:]+)\{", query)[0] for query in queries} <= served


def test_a_tensor_parallel_worker_has_a_gpu_for_each_rank(folder: Path) -> None:
    pod = worker_of(render(operators_overlay(folder, "tensor-parallel")))["spec"]["template"][
        "spec"
    ]
    [container] = pod["containers"]
    [ranks] = [var["value"] for var in container["env"] if "TENSOR_PARALLEL" in var["name"]]
    assert "LORAPLEX_TENSOR_PARALLEL" in {setting.name for setting in variables.read_by("worker")}
    for bound in ("requests", "limits"):
        assert container["resources"][bound]["nvidia.com/gpu"] == int(ranks)


def test_all_machines_of_a_worker_agree_and_only_they_reach_each_other(folder: Path) -> None:
    documents = render(operators_overlay(folder, "tensor-parallel-nodes"))
    [ranks] = [each for each in documents if each["kind"] == "StatefulSet"]
    worker, pods = worker_of(documents), ranks["spec"]["template"]
    theirs, ours = (
        {var["name"]: var.get("value") for var in each["spec"]["containers"][0]["env"]}
        for each in (pods, worker["spec"]["template"])
    )
    assert set(theirs) - {"HOME"} <= {setting.name for setting in variables.read_by("worker")}
    for name in ("TENSOR_PARALLEL", "NNODES", "MASTER_ADDR", "MODEL"):
        assert theirs[f"LORAPLEX_{name}"] == ours[f"LORAPLEX_{name}"]
    assert ranks["spec"]["replicas"] == int(ours["LORAPLEX_NNODES"]) - 1
    [image, other] = [
        each["spec"]["containers"][0]["image"] for each in (pods, worker["spec"]["template"])
    ]
    assert image == other
    [scaler] = [each for each in documents if _name(each) == ("HorizontalPodAutoscaler", "worker")]
    assert scaler["spec"]["minReplicas"] == scaler["spec"]["maxReplicas"] == 1
    [service] = [each for each in documents if _name(each) == ("Service", "worker-leader")]
    assert service["spec"]["publishNotReadyAddresses"]
    port = service["spec"]["ports"][0]["port"]
    assert ours["LORAPLEX_MASTER_ADDR"] == f"{service['metadata']['name']}:{port}"
    [policy] = [each for each in documents if _name(each) == ("NetworkPolicy", "worker-ranks")]
    [ingress] = policy["spec"]["ingress"]
    assert ingress == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}


def test_a_private_ca_is_where_the_services_look_for_it(folder: Path) -> None:
    documents = render(operators_overlay(folder, "private-ca"))
    [config] = [each for each in documents if _name(each) == ("ConfigMap", "loraplex")]
    path = Path(config["data"]["AWS_CA_BUNDLE"])
    for name in ("registry", "gateway", "worker"):
        [found] = [each for each in documents if _name(each) == ("Deployment", name)]
        pod = found["spec"]["template"]["spec"]
        assert {"name": "ca", "configMap": {"name": "loraplex-ca"}} in pod["volumes"]
        [container] = pod["containers"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "ca"]
        assert path == Path(mount["mountPath"], "ca.crt")
        assert {"configMapRef": {"name": "loraplex"}} in container["envFrom"]
