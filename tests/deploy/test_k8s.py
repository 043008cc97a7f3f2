"""The manifests render, are valid to the letter of the API, and keep what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from loraplex_services.common.limits import POOLS
from loraplex_services.common.settings import env, variables
from loraplex_services.gateway import config as gateway_config
from loraplex_services.registry import config as registry_config
from loraplex_services.worker import config as worker_config
from tests.certificates import Authority
from tests.deploy.kustomize import containers, pod_template, render
from tests.metrics import exported

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
VERSION = "1.32"


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Path:
    return K8S / "overlays" / str(request.param)


MTLS = "prod-mtls"
SERVICES = ["registry", "gateway", "worker"]
PATHS = {"readiness": "/readyz", "liveness": "/healthz"}


def workloads(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [doc for doc in documents if doc["kind"] in {"Deployment", "StatefulSet"}]


def identity(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def test_every_document_is_valid_under_strict_validation(overlay: Path) -> None:
    documents = render(overlay)
    assert {"registry", "gateway", "worker"} <= {doc["metadata"]["name"] for doc in documents}
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("name", ["backup", "fill-models"])
def test_jobs_are_valid_and_locked_down(name: str) -> None:
    claim, policy, job = _job_documents(name)
    for document in (claim, policy, job):
        kubernetes_validate.validate(document, VERSION, strict=True)
    _assert_locked_down(job)
    pod = pod_template(job)
    assert _claims(pod["spec"]["volumes"]) == {claim["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_workers_read_the_volume_that_the_job_fills() -> None:
    _, _, job = _job_documents("fill-models")
    worker = _deployment(render(K8S / "overlays" / "prod-cpu"), "worker")
    volumes = [pod_template(each)["spec"]["volumes"] for each in (job, worker)]
    assert _claims(volumes[0]) == _claims(volumes[1]) != set()


def _job_documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((K8S / "jobs" / f"{name}.yaml").read_text()))


def _claims(volumes: list[dict[str, Any]]) -> set[str]:
    kind = "persistentVolumeClaim"
    return {volume[kind]["claimName"] for volume in volumes if kind in volume}


def test_compose_sets_variables_that_its_services_read() -> None:
    composed = yaml.safe_load((K8S.parent / "compose.yaml").read_text())
    for name in SERVICES:
        own = set(composed["services"][name]["environment"]) - set(composed["x-environment"])
        read = {setting.name for setting in variables.read_by(name)}
        assert {variable for variable in own if variable.startswith("LORAPLEX_")} <= read


def test_a_wrong_document_would_be_refused(overlay: Path) -> None:
    deployment = workloads(render(overlay))[0]
    deployment["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


@pytest.mark.parametrize("name", ["prod-cpu", "prod-gpu", "prod-mtls"])
def test_an_overlay_pins_every_image_by_its_digest(name: str, tmp_path: Path) -> None:
    overlay = K8S / "overlays" / name
    named = sorted({c["image"] for doc in render(overlay) for c in containers(doc)})
    digests = {image: f"sha256:{index:064x}" for index, image in enumerate(named)}
    pinned = {
        "resources": [os.path.relpath(overlay, tmp_path)],
        "images": [
            {"name": image.rpartition(":")[0], "digest": digest}
            for image, digest in digests.items()
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(pinned))
    documents = render(tmp_path)
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(tmp_path)]
        out = subprocess.run(command, capture_output=True, check=True).stdout
        documents = list(yaml.safe_load_all(out))
    images = {c["image"] for doc in documents for c in containers(doc)}
    assert images == {f"{i.rpartition(':')[0]}@{digest}" for i, digest in digests.items()}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_rendering_equals_kubectl(overlay: Path) -> None:
    out = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, check=True)
    theirs = [doc for doc in yaml.safe_load_all(out.stdout) if doc]
    assert sorted(render(overlay), key=identity) == sorted(theirs, key=identity)


def test_pods_are_locked_down(overlay: Path) -> None:
    for workload in workloads(render(overlay)):
        _assert_locked_down(workload)


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_probed_on_a_port_they_open(overlay: Path, name: str) -> None:
    container = _container(render(overlay), name)
    opened = {port["containerPort"] for port in container["ports"]}
    expected = {
        # Only a worker waits for itself; a restart of the others brings no neighbour back.
        "startupProbe": "readiness" if name == "worker" else "liveness",
        "readinessProbe": "readiness",
        "livenessProbe": "liveness",
    }
    for probe, service in expected.items():
        if overlay.name == MTLS:
            assert container[probe]["httpGet"] == {"port": "metrics", "path": PATHS[service]}
            assert "grpc" not in container[probe], "the kubelet knows no TLS there"
        else:
            assert container[probe]["grpc"]["service"] == service
            assert container[probe]["grpc"]["port"] in opened


def test_every_shared_setting_is_a_known_variable(overlay: Path) -> None:
    shared = next(doc for doc in render(overlay) if identity(doc) == ("ConfigMap", "loraplex"))
    known = {setting.name for setting in env.ALL_SETTINGS}
    assert {name for name in shared["data"] if name.startswith("LORAPLEX_")} <= known


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_reads_every_setting_of_its_own(overlay: Path, name: str) -> None:
    read = {setting.name for setting in variables.read_by(name)}
    own = {var["name"] for var in _container(render(overlay), name)["env"]}
    assert {variable for variable in own if variable.startswith("LORAPLEX_")} <= read


def test_secrets_are_only_where_they_are_needed(overlay: Path) -> None:
    documents = render(overlay)
    stores = {
        name: [
            source["secretRef"]["name"]
            for source in _container(documents, name)["envFrom"]
            if "secretRef" in source
        ]
        for name in SERVICES
    }
    assert stores == {
        "registry": ["loraplex-objects"],
        "gateway": ["loraplex-objects-files"],
        "worker": ["loraplex-objects-read"],
    }
    for name in ("gateway", "worker"):
        deployment = _deployment(documents, name)
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        auth = next(volume for volume in volumes if volume["name"] == "auth")
        assert [item["key"] for item in auth["secret"]["items"]] == ["service-token"]


@pytest.mark.hostile
def test_no_manifest_contains_a_key_and_the_metadata_server_wants_a_password(overlay: Path) -> None:
    documents = render(overlay)
    names = [identity(doc)[1] for doc in documents if doc["kind"] == "Secret"]
    assert all(name.startswith("loraplex-objects") for name in names), "of the S3 server inside"
    urls = {
        variable["name"]: variable
        for name in ("registry", "gateway")
        for variable in _container(documents, name)["env"]
    }
    url, password = urls["LORAPLEX_METADATA"], urls.get("METADATA_PASSWORD")
    if ("Deployment", "valkey") not in map(identity, documents):
        assert url["valueFrom"]["secretKeyRef"]["name"] == "loraplex-metadata"
        return
    assert url["value"] == "redis://:$(METADATA_PASSWORD)@valkey:6379/0"
    server = _container(documents, "valkey")
    given = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in server["env"]}
    assert password is not None and password["valueFrom"]["secretKeyRef"] == given["REDISCLI_AUTH"]
    assert server["args"][-2:] == ["--requirepass", "$(REDISCLI_AUTH)"]


@pytest.mark.parametrize("name", ["prod-gpu", MTLS])
def test_autoscalers_read_metrics_that_are_served(name: str) -> None:
    served = {metric.name.replace(":", "_") for metric in exported()}
    documents = render(K8S / "overlays" / name)
    scalers = [doc for doc in documents if doc["kind"] == "HorizontalPodAutoscaler"]
    metrics = [metric for scaler in scalers for metric in scaler["spec"]["metrics"]]
    wanted = {
        metric[kind]["metric"]["name"]
        for metric in metrics
        for kind in ("external", "pods")
        if kind in metric
    }
    assert wanted and wanted <= served


def test_grace_period_covers_the_drain(overlay: Path) -> None:
    for workload in workloads(render(overlay)):
        pod = workload["spec"]["template"]["spec"]
        values = {var["name"]: var.get("value") for var in pod["containers"][0].get("env", [])}
        if "LORAPLEX_DRAIN_S" in values:
            pre_stop_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain_s = float(values["LORAPLEX_DRAIN_S"])
            assert pod["terminationGracePeriodSeconds"] > drain_s + pre_stop_s


def _assert_locked_down(workload: dict[str, Any]) -> None:
    pod = pod_template(workload)["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True, identity(workload)
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False, identity(workload)
    assert pod["enableServiceLinks"] is False, identity(workload)
    for container in containers(workload):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, container["name"]
        assert security["allowPrivilegeEscalation"] is False, container["name"]
        assert security["capabilities"] == {"drop": ["ALL"]}, container["name"]


def _deployment(documents: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(doc for doc in documents if identity(doc) == ("Deployment", name))


def _container(documents: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The container of a service."""
    deployment = _deployment(documents, name)
    container: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def _environment(documents: list[dict[str, Any]], name: str) -> dict[str, str]:
    """The variables of a service's container that the manifests give a value."""
    shared = next(doc for doc in documents if identity(doc) == ("ConfigMap", "loraplex"))
    env_of = _container(documents, name)["env"]
    own = {var["name"]: var["value"] for var in env_of if "value" in var}
    return {**shared["data"], **own}


def _mounted(documents: list[dict[str, Any]], name: str) -> dict[str, str]:
    """Where a service's container has which Secret."""
    pod = _deployment(documents, name)["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounts = pod["containers"][0]["volumeMounts"]
    return {m["mountPath"]: secrets[m["name"]] for m in mounts if m["name"] in secrets}


@pytest.mark.parametrize("name", SERVICES)
def test_with_mtls_each_service_has_a_secret_of_its_own_and_starts_with_its_files(
    name: str, tmp_path: Path
) -> None:
    documents = render(K8S / "overlays" / MTLS)
    assert _mounted(documents, name)["/etc/loraplex/tls"] == f"loraplex-tls-{name}"
    house = Authority(tmp_path / "house")
    pair = house.issue(name)
    files = {"ca.crt": house.ca, "tls.crt": pair.cert, "tls.key": pair.key}
    secrets = {f"/etc/loraplex/tls/{file}": str(path) for file, path in files.items()}
    (tmp_path / "token").write_text("service-token-0123456789abcdef")
    secrets["/etc/loraplex/auth/service-token"] = str(tmp_path / "token")
    given = _environment(documents, name)
    environ = {key: secrets.get(value, value) for key, value in given.items()}
    environ["LORAPLEX_STATE_DIR"] = str(tmp_path)
    modules = {"registry": registry_config, "gateway": gateway_config, "worker": worker_config}
    config = modules[name].from_env(environ)
    assert config.tls.proves_services
    assert config.tls.server(for_services=True) is not None


def test_with_mtls_the_gateway_dials_the_port_that_demands_certificates() -> None:
    documents = render(K8S / "overlays" / MTLS)
    registry = _environment(documents, "registry")
    listen = registry["LORAPLEX_REGISTRY_LISTEN"].rpartition(",mtls:0.0.0.0:")[2]
    gateway = _environment(documents, "gateway")
    assert gateway["LORAPLEX_REGISTRY_ADDRESS"] == f"registry:{listen}"
    assert set(registry["LORAPLEX_SERVICE_NAMES"].split(",")) == set(SERVICES)
    assert gateway["LORAPLEX_WORKERS"].startswith("dns:worker:"), "as in the workers' certificates"
    service = next(doc for doc in documents if identity(doc) == ("Service", "registry"))
    assert int(listen) in {port["port"] for port in service["spec"]["ports"]}
    policies = {doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == "NetworkPolicy"}
    opened = [
        (rule.get("from"), port["port"])
        for rule in policies["registry"]["spec"]["ingress"]
        for port in rule["ports"]
    ]
    only = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}]
    assert (only, int(listen)) in opened and (None, int(listen)) not in opened
    reached = {p["port"] for rule in policies["gateway"]["spec"]["egress"] for p in rule["ports"]}
    assert int(listen) in reached and 50052 not in reached


@pytest.mark.hostile
def test_metrics_are_open_to_the_namespace_that_monitors_and_to_nobody_else(overlay: Path) -> None:
    policies = [doc for doc in render(overlay) if doc["kind"] == "NetworkPolicy"]
    if not overlay.name.startswith("prod"):
        return
    rules = [
        rule
        for policy in policies
        for rule in policy["spec"].get("ingress", ())
        if any(port["port"] == 9090 for port in rule["ports"])
    ]
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert [rule["from"] for rule in rules] == [[{"namespaceSelector": monitoring}]] * 3


@pytest.mark.hostile
@pytest.mark.parametrize("name", SERVICES)
def test_the_processes_of_a_pod_together_stay_within_its_memory(overlay: Path, name: str) -> None:
    limit = _container(render(overlay), name)["resources"]["limits"]["memory"]
    pod_bytes = int(limit.removesuffix("Gi")) << 30
    helpers = sum(pool.num_processes * pool.memory_bytes for pool in POOLS[name])
    assert helpers <= 0.6 * pod_bytes, "what is left is for the service itself"
