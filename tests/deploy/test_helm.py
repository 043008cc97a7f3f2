"""The Helm chart is the overlay that it was written from, apart from what its values change."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.helm_chart import write_chart
from tests.deploy.kustomize import Document, render

OVERLAYS = Path(__file__).parents[2] / "deploy/k8s/overlays"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())
HELM = shutil.which("helm") or shutil.which("helm", path=Path(sys.executable).parent)
with_helm = pytest.mark.skipif(
    HELM is None, reason="there is no helm: run scripts/helm.sh, or have one on PATH"
)


def written(overlay: str, folder: Path) -> dict[str, Any]:
    """Write the chart of an overlay; returns its values."""
    write_chart(render(OVERLAYS / overlay), folder)
    values: dict[str, Any] = yaml.safe_load((folder / "values.yaml").read_text())
    return values


def by_identity(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Documents by kind and name; the order of variables that refer to no other means nothing."""
    for document in documents:
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                container["env"] = sorted(container.get("env", []), key=lambda each: each["name"])
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def rendered(folder: Path, *options: str) -> dict[tuple[str, str], Document]:
    """What Helm makes of the chart."""
    assert HELM is not None
    command = [HELM, "template", "loraplex", str(folder), "--namespace", "loraplex", *options]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return by_identity([each for each in yaml.safe_load_all(out.stdout) if each])


@with_helm
@pytest.mark.parametrize("overlay", NAMES)
def test_the_chart_renders_the_objects_of_its_overlay(overlay: str, tmp_path: Path) -> None:
    written(overlay, tmp_path)
    expected = by_identity(render(OVERLAYS / overlay))
    del expected["Namespace", "loraplex"]
    assert rendered(tmp_path) == expected


def test_settings_are_those_that_the_services_share(tmp_path: Path) -> None:
    documents = render(OVERLAYS / "dev")
    other: Document = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "edge"}, "data": {"a": "b"}
    }  # fmt: skip
    [shared] = [copy.deepcopy(each) for each in documents if each["kind"] == "ConfigMap"]
    write_chart([*documents, other], tmp_path)
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert values["settings"] == shared["data"]


@with_helm
def test_values_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    written("prod-gpu", tmp_path)
    plain = rendered(tmp_path)
    options = {
        "settings.LORAPLEX_OBJECTS": "s3://ours/loraplex",
        "gateway.image": "ghcr.io/my-org/loraplex-gateway:0.1.0",
        "worker.env.LORAPLEX_SERVED_MODEL_NAME": "our/base",
        "worker.maxReplicas": "32",
    }
    changed = rendered(tmp_path, *(f"--set={name}={value}" for name, value in options.items()))
    expected = copy.deepcopy(plain)
    expected["ConfigMap", "loraplex"]["data"]["LORAPLEX_OBJECTS"] = "s3://ours/loraplex"
    [gateway] = expected["Deployment", "gateway"]["spec"]["template"]["spec"]["containers"]
    gateway["image"] = options["gateway.image"]
    [worker] = expected["Deployment", "worker"]["spec"]["template"]["spec"]["containers"]
    [name] = [each for each in worker["env"] if each["name"] == "LORAPLEX_SERVED_MODEL_NAME"]
    name["value"] = "our/base"
    expected["HorizontalPodAutoscaler", "worker"]["spec"]["maxReplicas"] = 32
    assert changed == expected


@with_helm
def test_numbers_and_switches_reach_services_as_they_were_written(tmp_path: Path) -> None:
    written("prod-gpu", tmp_path)
    given = {"A": 10000000, "B": 0.5, "C": True, "D": "0x1", "E": ""}
    (tmp_path / "ours.yaml").write_text(
        yaml.safe_dump({"settings": given, "worker": {"env": given}})
    )
    made = rendered(tmp_path, "--values", str(tmp_path / "ours.yaml"))
    wanted = {"A": "10000000", "B": "0.5", "C": "true", "D": "0x1", "E": ""}
    assert made["ConfigMap", "loraplex"]["data"].items() >= wanted.items()
    [worker] = made["Deployment", "worker"]["spec"]["template"]["spec"]["containers"]
    assert {each["name"]: each.get("value") for each in worker["env"]}.items() >= wanted.items()


@with_helm
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("setting.LORAPLEX_AUTH=keys", "'setting' not allowed"),
        ("worker.replica=3", "'replica' not allowed"),
        ("worker.maxReplicas=many", "/worker/maxReplicas"),
    ],
)
def test_a_value_that_the_chart_does_not_have_is_refused_by_name(
    value: str, named: str, tmp_path: Path
) -> None:
    written("prod-gpu", tmp_path)
    with pytest.raises(AssertionError, match=named):
        rendered(tmp_path, "--set", value)


@with_helm
def test_another_namespace_reaches_every_object(tmp_path: Path) -> None:
    written("prod-cpu", tmp_path)
    documents = rendered(tmp_path, "--namespace", "elsewhere").values()
    assert {each["metadata"]["namespace"] for each in documents} == {"elsewhere"}


@pytest.mark.parametrize("overlay", NAMES)
def test_what_operators_change_is_a_value_with_the_overlays_default(
    overlay: str, tmp_path: Path
) -> None:
    values = written(overlay, tmp_path)
    documents = by_identity(render(OVERLAYS / overlay))
    assert values["settings"] == documents["ConfigMap", "loraplex"]["data"]
    for service in ("registry", "gateway", "worker"):
        deployment = documents["Deployment", service]["spec"]
        [container] = deployment["template"]["spec"]["containers"]
        assert values[service]["image"] == container["image"]
        assert values[service]["resources"] == container["resources"]
        plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert values[service]["env"] == plain
        has_autoscaler = ("HorizontalPodAutoscaler", service) in documents
        assert ("replicas" in values[service]) == ("replicas" in deployment)
        assert ("maxReplicas" in values[service]) == has_autoscaler


def test_templates_of_a_former_overlay_do_not_stay(tmp_path: Path) -> None:
    written("prod-gpu", tmp_path)
    written("prod-cpu", tmp_path)
    assert not list((tmp_path / "templates").glob("horizontalpodautoscaler-*"))


def test_what_helm_would_take_for_an_expression_is_refused(tmp_path: Path) -> None:
    config = {"kind": "ConfigMap", "metadata": {"name": "loraplex"}, "data": {"A": "{{ .B }}"}}
    with pytest.raises(ValueError, match="ConfigMap loraplex"):
        write_chart([config], tmp_path)
