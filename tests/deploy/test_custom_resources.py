"""Custom resources are valid by the definitions of the projects that they are for.

The models are made from the definitions of KEDA and the Prometheus operator. They check types and
required fields and drop what they do not know, so a document with an unknown field comes back
changed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KEDA, OPERATOR = "cloudcoil.models.keda.v1alpha1", "cloudcoil.models.prometheus_operator.v1"
RESOURCES = {
    "k8s/components/keda/scaled-object.yaml": KEDA,
    "monitoring/pod-monitor.yaml": OPERATOR,
    "monitoring/alerts.yaml": OPERATOR,
}


def read(path: str) -> dict[str, Any]:
    """A custom resource of ours."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / path).read_text())
    return document


def understood(document: dict[str, Any], module: str) -> dict[str, Any]:
    """What the model of its kind takes from a document. Raises ValueError if it is invalid."""
    model = getattr(importlib.import_module(module), document["kind"])
    parsed = model.model_validate(document)
    known: dict[str, Any] = parsed.model_dump(by_alias=True, exclude_unset=True, mode="json")
    return known


@pytest.mark.parametrize(("path", "module"), RESOURCES.items())
def test_a_custom_resource_is_valid(path: str, module: str) -> None:
    assert understood(read(path), module) == read(path)


@pytest.mark.parametrize(("path", "module"), RESOURCES.items())
def test_an_unknown_field_or_a_missing_one_would_be_noticed(path: str, module: str) -> None:
    document = read(path)
    document["spec"]["unknown"] = 1
    assert understood(document, module) != document
    del document["spec"]
    with pytest.raises(ValueError, match="spec"):
        understood(document, module)


def test_every_custom_resource_is_checked_here() -> None:
    paths = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*.yaml")}
    custom = {path for path in paths - {"compose.yaml"} if _is_custom((DEPLOY / path).read_text())}
    assert custom == set(RESOURCES)


def _is_custom(text: str) -> bool:
    groups = [
        str(each.get("apiVersion", "")).partition("/")[0] for each in yaml.safe_load_all(text)
    ]
    return any(
        "." in group and not group.endswith(("k8s.io", ".config.k8s.io")) for group in groups
    )
