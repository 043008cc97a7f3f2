"""The operators' pages name only what the manifests have, and make every Secret that these need."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import Document, render

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
PAGES = sorted((ROOT / "docs" / "operate").glob("*.md"))
OWN_FOLDER = "deploy/k8s/overlays/mine"
OWN_JOB = ("job", "backup-now")
"""What an operator makes by following the pages."""


@cache
def documents() -> list[Document]:
    """All objects of all overlays, components and jobs."""
    found = [doc for path in sorted((K8S / "overlays").iterdir()) for doc in render(path)]
    parts = {*K8S.glob("components/*/*.yaml")} - {*K8S.glob("components/*/kustomization.yaml")}
    for path in sorted({*parts, *K8S.glob("jobs/*.yaml")}):
        found += [doc for doc in yaml.safe_load_all(path.read_text()) if doc]
    return found


def calls(text: str) -> Iterator[list[str]]:
    """The words of each call of kubectl, in blocks and in sentences."""
    for match in re.finditer(r"kubectl ((?:[^`\n|>&]|\n *--)+)", text):
        yield shlex.split(match[1], comments=True)


CALLS = {
    f"{page.stem}: {' '.join(words)[:80]}": words
    for page in PAGES
    for words in calls(page.read_text())
}


@pytest.mark.parametrize("words", CALLS.values(), ids=CALLS)
def test_what_a_command_names_exists(words: list[str]) -> None:
    named = {(doc["kind"].lower(), doc["metadata"]["name"]) for doc in documents()} | {OWN_JOB}
    kinds = {kind for kind, _ in named}
    for word in words:
        if word.startswith("deploy/") and word != OWN_FOLDER:
            assert (ROOT / word).exists()
        object_ = re.fullmatch(r"(?:--from=)?([a-z]+)/([a-z0-9-]+)", word)
        if object_ and object_[1] in kinds:
            assert object_.groups() in named


@pytest.mark.parametrize(
    "words", [pytest.param(w, id=name) for name, w in CALLS.items() if "port-forward" in w]
)
def test_a_forwarded_port_is_one_of_the_service(words: list[str]) -> None:
    _, _, name = words[-2].partition("/")
    [*services] = [
        doc["spec"]["ports"]
        for doc in documents()
        if (doc["kind"], doc["metadata"]["name"]) == ("Service", name)
    ]
    assert services and all(
        int(words[-1].rpartition(":")[2]) in {each["port"] for each in ports} for ports in services
    )


def secrets_made() -> dict[str, set[str]]:
    """Keys by the Secret that a page creates with them."""
    made: dict[str, set[str]] = defaultdict(set)
    for words in CALLS.values():
        if "secret" in words:
            options = " ".join(words)
            keys = re.findall(r"--from-(?:file|literal)=([\w.-]+)", options)
            made[words[words.index("secret") + 2]].update(keys)
    return made


def secrets_read(value: Any) -> Iterator[tuple[str, str]]:
    """Each Secret that part of a manifest reads and the key, "" = all of them."""
    if isinstance(value, dict):
        if "secretKeyRef" in value:
            yield value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]
        if "secretName" in value:
            for item in value.get("items", [{"key": ""}]):
                yield value["secretName"], item["key"]
        if "secretRef" in value:
            yield value["secretRef"]["name"], ""
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:
            yield from secrets_read(child)


def test_the_pages_create_every_secret_that_the_manifests_read() -> None:
    made = secrets_made()
    read = set(secrets_read(documents()))
    missing = {(name, key) for name, key in read if not (key in made[name] if key else made[name])}
    assert missing == set()
