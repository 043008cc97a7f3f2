"""Beyond one machine or cluster, clients reach the services through the edge only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import Document, containers, pod_template, render

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "k8s" / "overlays").iterdir())
EDGE = DEPLOY / "k8s" / "components" / "edge"
LOOPBACK = "127.0.0.1:"
UPSTREAMS = {"EDGE_GATEWAY_HTTP", "EDGE_GATEWAY", "EDGE_REGISTRY"}

pytestmark = pytest.mark.hostile


def compose(name: str) -> dict[str, Any]:
    """The services of a Compose file."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())["services"]
    return services


def is_exposed(document: Document) -> bool:
    """Whether a Service or a pod is reachable at an address of a node or of a load balancer."""
    if document["kind"] == "Service":
        spec = document["spec"]
        return spec.get("type", "ClusterIP") != "ClusterIP" or "externalIPs" in spec
    ports = [port for each in containers(document) for port in each.get("ports", [])]
    on_node = any("hostPort" in port for port in ports)
    return on_node or (bool(ports) and pod_template(document)["spec"].get("hostNetwork", False))


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_of_an_overlay_is_reachable_from_outside_the_cluster(name: str) -> None:
    documents = render(DEPLOY / "k8s" / "overlays" / name)
    assert not [doc["metadata"]["name"] for doc in documents if is_exposed(doc)]
    assert not [doc for doc in documents if doc["kind"] in {"Ingress", "Gateway", "HTTPRoute"}]


def test_the_component_exposes_the_edge_alone() -> None:
    exposed = [
        doc for doc in yaml.safe_load_all((EDGE / "edge.yaml").read_text()) if is_exposed(doc)
    ]
    assert [(doc["kind"], doc["metadata"]["name"]) for doc in exposed] == [("Service", "edge")]


def test_compose_publishes_the_ports_of_services_on_loopback_and_the_edge_with_keys() -> None:
    own, public = compose("compose.yaml"), compose("compose.public.yaml")
    published = [port for service in own.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith(LOOPBACK) for port in published)
    assert [name for name, service in public.items() if "ports" in service] == ["edge"]
    with_auth = {
        name for name, each in own.items() if "LORAPLEX_AUTH" in each.get("environment", {})
    }
    assert with_auth == {"registry", "gateway", "worker"}
    assert all(public[name]["environment"]["LORAPLEX_AUTH"] == "keys" for name in with_auth)


def test_compose_runs_the_edge_as_the_manifest_does() -> None:
    [deployment] = [
        doc
        for doc in yaml.safe_load_all((EDGE / "edge.yaml").read_text())
        if doc["kind"] == "Deployment"
    ]
    [pod] = containers(deployment)
    edge = compose("compose.public.yaml")["edge"]
    assert (edge["image"], edge["command"]) == (pod["image"], pod["command"])
    theirs = {var["name"]: var["value"] for var in pod["env"]}
    assert set(edge["environment"]) == set(theirs)
    differing = {name for name in theirs if edge["environment"][name] != theirs[name]}
    assert differing == UPSTREAMS
    [settings] = [path for path in edge["volumes"] if path.endswith("/haproxy.cfg:ro")]
    assert (DEPLOY / settings.partition(":")[0]).samefile(EDGE / "haproxy.cfg")
