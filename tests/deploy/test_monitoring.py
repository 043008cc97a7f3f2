"""The dashboard and the alerts ask for metrics that are served, of pods that the manifests make."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


FIRING = {
    "LoraplexNoReadyWorker": {"loraplex_gateway_ready_workers{base='b'}": "0x30"},
    "LoraplexLongWait": {"loraplex_gateway_estimated_wait_seconds{base='b'}": "6x30"},
    "LoraplexRefusals": {
        "loraplex_gateway_rejections_total{reason='queue_full'}": "0+10x30",
        "loraplex_gateway_requests_total{outcome='ok'}": "0+100x30",
    },
    "LoraplexFailures": {"loraplex_gateway_requests_total{outcome='internal'}": "0+1x30"},
    "LoraplexAdapterLoadsFail": {
        "loraplex_gateway_requests_total{outcome='fetch_failed'}": "0+1x30"
    },
    "LoraplexStreamsMoveOften": {"loraplex_gateway_continuations_total": "0+60x30"},
    "LoraplexIndexBehind": {"loraplex_registry_index_lag_seconds": "301x30"},
    "LoraplexMetadataMemory": {
        "loraplex_registry_metadata_bytes": "900x30",
        "loraplex_registry_metadata_max_bytes": "1000x30",
    },
    "LoraplexDown": {"up{namespace='loraplex', pod='p'}": "0x30"},
}
"""Series, one value a minute, that must fire each alert and no other."""
HEALTHY = {
    "loraplex_gateway_ready_workers{base='b'}": "2x30",
    "loraplex_gateway_estimated_wait_seconds{base='b'}": "0.1x30",
    "loraplex_gateway_rejections_total{reason='queue_full'}": "0+1x30",
    "loraplex_gateway_requests_total{outcome='ok'}": "0+100x30",
    "loraplex_gateway_continuations_total": "0+1x30",
    "loraplex_registry_index_lag_seconds": "3x30",
    "loraplex_registry_metadata_bytes": "900x30",
    "loraplex_registry_metadata_max_bytes": "0x30",
    "up{namespace='loraplex', pod='p'}": "1x30",
}


def _rules() -> dict[str, Any]:
    """The alerts as Prometheus itself reads them."""
    spec: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
    return spec


def test_every_alert_names_its_runbook() -> None:
    runbooks = (DEPLOY.parent / "docs" / "operate" / "runbooks.md").read_text()
    sections = re.findall(r"^### (Loraplex\w+)$", runbooks, re.MULTILINE)
    rules = _rules()["groups"][0]["rules"]
    assert sorted(rule["alert"] for rule in rules) == sorted(sections) == sorted(FIRING)
    for rule in rules:
        named = f"docs/operate/runbooks.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == named


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(_rules()))
    cases = [*((series, [alert]) for alert, series in FIRING.items()), (HEALTHY, [])]
    tests = [_promtool_case(series, alerts) for series, alerts in cases]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests})
    )
    command = ["promtool", "test", "rules", "tests.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _promtool_case(series: dict[str, str], alerts: list[str]) -> dict[str, Any]:
    """After half an hour of these series, exactly these alerts fire."""
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "28m",
                "exp_samples": firing,
            }
        ],
    }
