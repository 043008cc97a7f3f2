"""The images hold what their Dockerfiles copy, and run as nobody in particular."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.kustomize import containers, render

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
EXTRAS = {
    "gateway": ["gateway", "tracing"],
    "registry": ["registry"],
    "worker": ["worker", "tracing"],
    "worker-cuda": ["worker", "tracing"],
}
"""What the list of each image is made from."""


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.stem)
def lines(request: pytest.FixtureRequest) -> list[str]:
    return Path(request.param).read_text().replace("\\\n", " ").splitlines()


def _in_context(source: str) -> bool:
    """Whether .dockerignore, which leaves out everything first, lets a path in again."""
    first, *rest = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert first == "*"
    let_in = [ROOT / line[1:] for line in rest if line.startswith("!")]
    return any((ROOT / source).is_relative_to(path) for path in let_in)


def test_everything_copied_is_there_and_in_the_context(lines: list[str]) -> None:
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    sources = [source for words in copied if "--from=build" not in words for source in words]
    assert sources
    assert all((ROOT / source).exists() and _in_context(source) for source in sources), sources


def hashed(name: str) -> dict[str, str]:
    """The versions in a list of requirements, each of which must have a hash."""
    text = (ROOT / "deploy" / "docker" / "requirements" / f"{name}.txt").read_text()
    versions = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            pin, *hashes = entry.split(" --hash=")
            assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64} *", h) for h in hashes), entry
            requirement = Requirement(pin)
            versions[requirement.name] = str(requirement.specifier).removeprefix("==")
    return versions


def needed(name: str, extras: list[str], found: set[str]) -> set[str]:
    """A package and all that it needs here, by the metadata of what is installed."""
    name = canonicalize_name(name)
    if (seen := f"{name}{sorted(extras)}") in found:
        return set()
    found.add(seen)
    names = {name}
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if any(not (m := requirement.marker) or m.evaluate({"extra": e}) for e in ("", *extras)):
            names |= needed(requirement.name, sorted(requirement.extras), found)
    return names


def test_images_install_only_files_whose_hashes_are_listed(lines: list[str]) -> None:
    installs = [part for line in lines for part in line.split("&&") if "pip install" in part]
    unlisted = [part for part in installs if "--require-hashes -r" not in part]
    local = [part for part in unlisted if part.split()[-1] == "/dist/*.whl"]
    assert len(local) == 1 and len(installs) >= 3
    torch = [part for part in unlisted if '"${TORCH}"' in part]
    assert len(unlisted) == len(local) + len(torch)
    assert all("--no-deps" in part for part in unlisted)


@pytest.mark.parametrize("name", [*EXTRAS, "build"])
def test_images_have_the_versions_that_the_tests_run_on(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and line[0] != "#"]
    pins = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in tested}
    versions = hashed(name)
    assert versions == versions | {n: pins[n] for n in versions.keys() & pins.keys()}


@pytest.mark.parametrize("name", EXTRAS)
def test_the_list_of_an_image_has_all_that_its_packages_need(name: str) -> None:
    from_elsewhere = {"torch"} if name == "worker" else set()
    assert needed("loraplex", EXTRAS[name], set()) - from_elsewhere <= {"loraplex", *hashed(name)}


def test_images_carry_a_list_of_what_they_hold(lines: list[str]) -> None:
    (made,) = [line for line in lines if "cyclonedx-py environment" in line]
    assert "--output-file /opt/loraplex/sbom.cdx.json /opt/loraplex/bin/python" in made
    assert lines.index(made) < lines.index("COPY --from=build /opt/loraplex /opt/loraplex")


def test_images_run_without_privileges(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]


def test_the_health_check_asks_a_port_that_is_open_by_default(lines: list[str]) -> None:
    environment = " ".join(line for line in lines if line.startswith("ENV "))
    (check,) = [line for line in lines if line.startswith("HEALTHCHECK ")]
    listen = environment.partition("LORAPLEX_METRICS_LISTEN=")[2].split()[0]
    assert f"http://{listen}/healthz" in check


def test_every_image_of_ours_in_a_manifest_is_built() -> None:
    listed = subprocess.run(
        [ROOT / "scripts" / "images.sh", "list"], check=True, capture_output=True, text=True
    )
    folder = ROOT / "deploy" / "k8s"
    documents = [doc for path in (folder / "overlays").iterdir() for doc in render(path)]
    for path in (folder / "jobs").iterdir():
        documents += yaml.safe_load_all(path.read_text())
    named = {container["image"] for doc in documents for container in containers(doc)}
    composed = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    named |= {service["image"] for service in composed.values()}
    ours = {image for image in named if image.startswith("loraplex-")}
    assert ours == set(listed.stdout.split())
