"""The dashboard and the alerts ask for metrics that are served, of pods that the manifests make."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY

from tests.deploy.kustomize import containers, render
from tests.metrics import exported

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}


def _asked() -> dict[str, list[str]]:
    """PromQL by where it stands."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"][0]["rules"]
    panels = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }
    return panels | {rule["alert"]: [rule["expr"]] for rule in rules}


def _served() -> set[str]:
    """Names of series of our services, and those of any process."""
    process = [family for family in REGISTRY.collect() if family.name.startswith("process_")]
    named = [(metric.name, metric.kind) for metric in exported()]
    named += [(family.name, family.type) for family in process]
    return {name + suffix for name, kind in named for suffix in SUFFIXES.get(kind, [""])} | {"up"}


@pytest.mark.parametrize(("place", "expressions"), _asked().items())
def test_every_series_asked_for_is_served(place: str, expressions: list[str]) -> None:
    for expression in expressions:
        named = set(re.findall(r"\b(?:loraplex|vllm:|process)_?[a-z_]+|\bup\b", expression))
        assert named and named <= _served(), expression


def test_labels_asked_for_are_those_of_the_metrics() -> None:
    of_targets = {"namespace", "pod", "le"}
    labels = {metric.name: metric.labels for metric in exported()}
    for expression in (one for several in _asked().values() for one in several):
        grouped = re.findall(r"by \(([^)]*)\) \((?:rate\(|deriv\()?([\w:]+)", expression)
        for words, series in grouped:
            name = re.sub(r"_(total|bucket|count)$", "", series)
            assert {*words.split(", ")} <= of_targets | labels.get(name, set()), expression


def test_the_monitor_scrapes_the_port_of_every_service() -> None:
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text())["spec"]
    (selected,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    deployments = {
        doc["spec"]["template"]["metadata"]["labels"][selected["key"]]: doc
        for doc in render(DEPLOY / "k8s" / "base")
        if doc["kind"] == "Deployment"
    }
    assert set(selected["values"]) == set(deployments)
    for deployment in deployments.values():
        ports = {port["name"] for port in containers(deployment)[0]["ports"]}
        assert endpoint["port"] in ports


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_the_folder() -> None:
    out = subprocess.run(["kubectl", "kustomize", str(MONITORING)], capture_output=True, check=True)
    kinds = {doc["kind"] for doc in yaml.safe_load_all(out.stdout)}
    assert kinds == {"ConfigMap", "PodMonitor", "PrometheusRule"}
