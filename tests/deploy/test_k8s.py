"""The manifests render, are valid to the letter of the API, and keep what they promise."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common import env
from tests.deploy.kustomize import containers, render

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
VERSION = "1.32"


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Path:
    return K8S / "overlays" / str(request.param)


def workloads(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [doc for doc in documents if doc["kind"] in {"Deployment", "StatefulSet"}]


def identity(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_every_document_is_valid_under_strict_validation(overlay: Path) -> None:
    documents = render(overlay)
    assert {"registry", "gateway", "worker"} <= {doc["metadata"]["name"] for doc in documents}
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_wrong_document_would_be_refused(overlay: Path) -> None:
    deployment = workloads(render(overlay))[0]
    deployment["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_rendering_equals_kubectl(overlay: Path) -> None:
    out = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, check=True)
    theirs = [doc for doc in yaml.safe_load_all(out.stdout) if doc]
    assert sorted(render(overlay), key=identity) == sorted(theirs, key=identity)


def test_pods_are_locked_down(overlay: Path) -> None:
    for workload in workloads(render(overlay)):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, identity(workload)
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert pod["automountServiceAccountToken"] is False, identity(workload)
        for container in containers(workload):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, container["name"]
            assert security["allowPrivilegeEscalation"] is False, container["name"]
            assert security["capabilities"] == {"drop": ["ALL"]}, container["name"]


@pytest.mark.parametrize("name", ["registry", "gateway", "worker"])
def test_services_are_probed_over_grpc_on_a_port_they_open(overlay: Path, name: str) -> None:
    deployment = next(doc for doc in workloads(render(overlay)) if doc["metadata"]["name"] == name)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    opened = {port["containerPort"] for port in container["ports"]}
    expected = {
        "startupProbe": "readiness",
        "readinessProbe": "readiness",
        "livenessProbe": "liveness",
    }
    for probe, service in expected.items():
        grpc = container[probe]["grpc"]
        assert grpc["service"] == service
        assert grpc["port"] in opened


def test_every_setting_is_a_known_variable(overlay: Path) -> None:
    known = {knob.name for knob in env.ALL_KNOBS}
    for document in render(overlay):
        names = list(document.get("data", {})) if document["kind"] == "ConfigMap" else []
        names += [var["name"] for box in containers(document) for var in box.get("env", [])]
        ours = {name for name in names if name.startswith("LORAPLEX_")}
        assert ours <= known, ours - known


def test_grace_period_covers_the_drain(overlay: Path) -> None:
    for workload in workloads(render(overlay)):
        pod = workload["spec"]["template"]["spec"]
        values = {var["name"]: var.get("value") for var in pod["containers"][0].get("env", [])}
        if "LORAPLEX_DRAIN_S" in values:
            pre_stop_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain_s = float(values["LORAPLEX_DRAIN_S"])
            assert pod["terminationGracePeriodSeconds"] > drain_s + pre_stop_s
