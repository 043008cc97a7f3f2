"""Write a Helm chart from an overlay of deploy/k8s, which stays the only source.

    kubectl kustomize deploy/k8s/overlays/prod-gpu | python scripts/helm_chart.py build/chart

What operators change becomes a value, whose default is the overlay's: the shared settings, and for
each Deployment its image, environment and resources, and its replicas or the bounds of its
autoscaler. Everything else is copied. The Namespace is left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

SHARED = "loraplex"
"""The ConfigMap that all services read. Others are taken as they are."""
SETTINGS = "settings"
"""The value with the data of the shared ConfigMap."""
_TEXT = '{{ toJson (ternary $value (toJson $value) (kindIs "string" $value)) }}'
"""A variable's value as a string. Helm's toString would write 10000000 as 1e+07."""
_VARIABLES = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
_TYPES: dict[str, Any] = {
    "env": _VARIABLES,
    "image": {"type": "string"},
    "resources": {"type": "object"},
}
"""Schemas of the values of a Deployment; those that are not here are numbers of replicas."""

Document = dict[str, Any]
Values = dict[str, Any]


def write_chart(documents: list[Document], folder: Path) -> None:
    """Write Chart.yaml, values.yaml with its schema, and a template for each document. Mutates:
    documents.

    Raises:
        ValueError: a manifest contains what Helm would take for an expression.
    """
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    for old in templates.glob("*.yaml"):
        old.unlink()
    values: Values = {}
    for document in documents:
        if document["kind"] != "Namespace":
            name = f"{document['kind'].lower()}-{document['metadata']['name']}.yaml"
            (templates / name).write_text(Template(document, values).text())
    (folder / "Chart.yaml").write_text(yaml.safe_dump(_chart(), sort_keys=False))
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    (folder / "values.schema.json").write_text(json.dumps(_schema(values), indent=2) + "\n")


def _chart() -> Document:
    source = (Path(__file__).parents[1] / "loraplex" / "__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)[0]
    return {
        "apiVersion": "v2",
        "name": "loraplex",
        "description": "Serve thousands of LoRA adapters from one base model.",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.30.0-0",
    }


def _schema(values: Values) -> Document:
    """The JSON Schema by which Helm refuses values that the chart does not have."""

    def closed(properties: dict[str, Any]) -> Document:
        return {"type": "object", "additionalProperties": False, "properties": properties}

    properties: dict[str, Any] = {"global": {"type": "object"}}  # which Helm gives to subcharts
    for name, fields in values.items():
        types = {field: _TYPES.get(field, {"type": "integer"}) for field in fields}
        properties[name] = _VARIABLES if name == SETTINGS else closed(types)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **closed(properties)}


class Template:
    """One document with expressions in place of what operators change."""

    def __init__(self, document: Document, values: Values) -> None:
        """Mutates: document, and values, which gets the defaults."""
        self._name = document["metadata"]["name"]
        if "{{" in json.dumps(document):
            raise ValueError(f"{document['kind']} {self._name}: {{{{ would be an expression")
        self._document, self._values = document, values
        self._expressions: list[str] = []
        document["metadata"]["namespace"] = self._mark("{{ .Release.Namespace }}")
        if (document["kind"], self._name) == ("ConfigMap", SHARED):
            values[SETTINGS] = document["data"]
            loop = self._for_each(SETTINGS, f"{{{{ toJson $name }}}}: {_TEXT}, ")
            document["data"] = self._mark(f"{{ {loop}}}")
        elif document["kind"] == "HorizontalPodAutoscaler":
            self._take(document["spec"], "minReplicas", "maxReplicas")
        elif document["kind"] == "Deployment":
            [container] = document["spec"]["template"]["spec"]["containers"]
            self._take(document["spec"], "replicas")
            self._take(container, "image", "resources")
            self._take_env(container)

    def text(self) -> str:
        """The template."""
        text = yaml.safe_dump(self._document, sort_keys=False, width=10_000)
        return re.sub("__helm_([0-9]+)__", lambda mark: self._expressions[int(mark[1])], text)

    def _mark(self, expression: str) -> str:
        """The placeholder of an expression until the document is text."""
        self._expressions.append(expression)
        return f"__helm_{len(self._expressions) - 1}__"

    def _take(self, parent: dict[str, Any], *fields: str) -> None:
        """Make values of the fields that there are. Mutates: parent."""
        for field in fields:
            if field in parent:
                self._values.setdefault(self._name, {})[field] = parent[field]
                parent[field] = self._mark(f"{{{{ toJson .Values.{self._name}.{field} }}}}")

    def _take_env(self, container: dict[str, Any]) -> None:
        """Make a value of the variables, by name; those from Secrets are copied first."""
        plain = {
            each["name"]: each["value"] for each in container.get("env", []) if "value" in each
        }
        copied = [json.dumps(each) for each in container.get("env", []) if "value" not in each]
        self._values.setdefault(self._name, {})["env"] = plain
        each = f"{{name: {{{{ toJson $name }}}}, value: {_TEXT}}}, "
        loop = self._for_each(f"{self._name}.env", each)
        container["env"] = self._mark(f"[{''.join(f'{text}, ' for text in copied)}{loop}]")

    def _for_each(self, value: str, text: str) -> str:
        """A text for each $name and $value of a value."""
        return f"{{{{ range $name, $value := .Values.{value} }}}}{text}{{{{ end }}}}"


if __name__ == "__main__":
    write_chart([each for each in yaml.safe_load_all(sys.stdin) if each], Path(sys.argv[1]))
