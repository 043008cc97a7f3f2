"""Renders the part of kustomize that deploy/k8s uses, so that the tests need no kubectl.

Understands resources, components, namespace, images, JSON6902 patches and ConfigMaps made of files
under names of their own; anything else in a kustomization is an error. Where kubectl is installed a
test compares both renderings.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Document = dict[str, Any]
CLUSTER_SCOPED = {"Namespace"}
KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "configMapGenerator"),
    *("components", "images", "patches"),
}


def render(folder: Path) -> list[Document]:
    """All documents of an overlay, patched; the caller's own."""
    return copy.deepcopy(_rendered(folder.resolve()))


@cache
def _rendered(folder: Path) -> list[Document]:
    documents: list[Document] = []
    _build(folder, documents)
    return documents


def _build(folder: Path, documents: list[Document]) -> None:
    """Append the folder's resources to `documents`, then let its components and patches work."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(spec) - KNOWN
    if unknown:
        raise ValueError(f"{folder}: this renderer does not know {sorted(unknown)}")
    for entry in spec.get("resources", []):
        path = folder / entry
        if path.is_dir():
            _build(path.resolve(), documents)
        else:
            documents += [doc for doc in yaml.safe_load_all(path.read_text()) if doc]
    documents += [_config_map(folder, made) for made in spec.get("configMapGenerator", [])]
    for entry in spec.get("components", []):
        _build((folder / entry).resolve(), documents)
    for patch in spec.get("patches", []):
        _patch(documents, patch)
    for image in spec.get("images", []):
        _set_image(documents, image)
    if "namespace" in spec:
        for document in documents:
            if document["kind"] not in CLUSTER_SCOPED:
                document["metadata"]["namespace"] = spec["namespace"]


def _config_map(folder: Path, made: dict[str, Any]) -> Document:
    options = made["options"]
    if set(made) != {"name", "files", "options"} or not options["disableNameSuffixHash"]:
        raise ValueError(f"{folder}: this renderer does not know the ConfigMap {made}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": made["name"], "labels": options["labels"]},
        "data": {name: (folder / name).read_text() for name in made["files"]},
    }


def _patch(documents: list[Document], patch: dict[str, Any]) -> None:
    target = patch["target"]
    hits = [
        index
        for index, doc in enumerate(documents)
        if all(
            re.fullmatch(pattern, doc["kind"] if key == "kind" else doc["metadata"][key])
            for key, pattern in target.items()
        )
    ]
    if not hits:
        raise ValueError(f"patch target {target} matches nothing")
    for index in hits:
        documents[index] = jsonpatch.apply_patch(documents[index], yaml.safe_load(patch["patch"]))


def _set_image(documents: list[Document], image: dict[str, str]) -> None:
    for document in documents:
        for container in containers(document):
            if container["image"].split(":")[0] == image["name"]:
                version = f"@{image['digest']}" if "digest" in image else f":{image['newTag']}"
                container["image"] = image.get("newName", image["name"]) + version


def pod_template(workload: Document) -> Document:
    """What a workload makes pods of."""
    spec: Document = workload["spec"]
    template: Document = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]
    return template


def containers(document: Document) -> list[dict[str, Any]]:
    """Every container of a workload, init containers too."""
    if document["kind"] not in {"Deployment", "StatefulSet", "Job", "CronJob"}:
        return []
    pod = pod_template(document)["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]
