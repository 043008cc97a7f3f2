"""The images hold what their Dockerfiles copy, and run as nobody in particular."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.kustomize import containers, render

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


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
