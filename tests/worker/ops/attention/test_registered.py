"""The backend that the documentation builds, registered by a package, through the whole engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env
from loraplex_services.worker.ops.attention.backend import AttentionBackend
from loraplex_services.worker.ops.attention.registered import registered_backend
from loraplex_services.worker.runner.building import build_runner
from tests.worker import tiny
from tests.worker.engine_stage import A, B, Stage, mixed
from tests.worker.ops.attention import contract

PAGE = Path(__file__).parents[4] / "docs/internals/attention-backends.md"


def code(language: str, part: str) -> str:
    """The block of the page that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    [found] = [block for block in blocks if part in block]
    return found


def install(folder: Path, distribution: str, entry_points: str) -> None:
    """What `pip install` leaves of a distribution without files."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[loraplex.attention_backends]\n{entry_points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packages of these tests are installed, with the page's backend as a module."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "toy_attention.py").write_text(code("python", "class ToyAttention"))
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("toy_attention", None)


@pytest.fixture
def toy(site: Path) -> type[AttentionBackend]:
    registration = code("toml", "entry-points").splitlines()
    assert registration[0] == '[project.entry-points."loraplex.attention_backends"]'
    install(site, "toy-attention", registration[1].replace('"', ""))
    found = registered_backend("toy")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tiny.write_base(folder / "base")
    for number, digest in enumerate((A, B)):
        tiny.write_adapter(folder / digest, seed=number)
    return folder


def outputs(files: Path, backend: str) -> dict[str, list[int]]:
    runner = build_runner(
        files / "base",
        device="cpu",
        dtype="float32",
        arena_bytes=1 << 20,
        attention_backend=backend,
    )
    expected = f"-{backend}" if backend == "toy" else ""
    assert runner._batches.attention.name == expected.removeprefix("-")
    stage = Stage(runner, files, max_step_tokens=32)
    return stage.run(*mixed(), *stage.fetched(A, B))


def test_the_backend_of_the_page_serves_the_tokens_of_vanilla(
    toy: type[AttentionBackend], files: Path
) -> None:
    assert outputs(files, "toy") == outputs(files, "vanilla")


def test_the_backend_of_the_page_fulfils_the_contract(toy: type[AttentionBackend]) -> None:
    names: dict[str, Any] = {"contract": contract, "torch": torch, "ToyAttention": toy}
    exec(code("python", "contract.cases"), names)
    assert names["maker"].name == "toy"


def test_a_registered_name_is_a_value_of_the_setting(toy: type[AttentionBackend]) -> None:
    assert env.ATTENTION_BACKEND.read({"LORAPLEX_ATTENTION_BACKEND": "toy"}) == "toy"


@pytest.mark.parametrize("name", ["flashinfr", "tritn", "", "toy"])
def test_a_name_that_nobody_registers_is_refused_by_the_setting(name: str) -> None:
    with pytest.raises(Exception, match="LORAPLEX_ATTENTION_BACKEND"):
        env.ATTENTION_BACKEND.read({"LORAPLEX_ATTENTION_BACKEND": name or " "})


@pytest.mark.parametrize(
    ("entry_point", "why"),
    [
        ("toy = no_such_module:Toy", "no_such_module"),
        ("toy = toy_attention:Missing", "Missing"),
        ("toy = toy_attention:ToyMetadata", "not an AttentionBackend"),
    ],
)
def test_what_is_no_backend_is_refused_by_name(site: Path, entry_point: str, why: str) -> None:
    install(site, "broken", entry_point)
    with pytest.raises(InvalidRequest, match=why) as caught:
        registered_backend("toy")
    assert [violation.field for violation in caught.value.violations] == ["attention_backend"]


def test_a_name_of_two_packages_is_refused_naming_both(
    toy: type[AttentionBackend], site: Path
) -> None:
    install(site, "other-toy", "toy = toy_attention:ToyAttention")
    with pytest.raises(InvalidRequest, match="other-toy, toy-attention"):
        registered_backend("toy")


def test_nobody_registers_an_unknown_name() -> None:
    assert registered_backend("nobody") is None
