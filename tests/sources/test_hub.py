"""Adapters from a server that speaks the hub's API, by the hub's own client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.sources.servers import COMMIT, Answer, Hub, served

ADAPTER = Path(__file__).parents[2] / "demo" / "adapters" / "mask"
FILES = {path.name: path.read_bytes() for path in ADAPTER.iterdir()}
PROGRAM = """
import sys
from pathlib import Path
from loraplex.errors import LoraplexError
from loraplex.sources import fetch

folder, flags, *sources = sys.argv[1:]
for source in sources:
    try:
        warnings = fetch(source, Path(folder), pickled="pickled" in flags)
        print("warning", *[warning.value for warning in warnings])
    except LoraplexError as error:
        print(type(error).__name__, error.message)
"""


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    files = {**FILES, "README.md": b"# hello", "image.png": b"1", "runs/x": b"2"}
    hub = Hub(files)
    with served(hub) as address:
        yield hub, f"http://{address}"


def fetch_all(
    endpoint: str, folder: Path, *sources: str, flags: str = "", token: str = ""
) -> list[str]:
    """What is said of each, fetched in turn in a process of its own, as the hub's client reads its
    variables once."""
    folder.mkdir()
    environ = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder.parent / "home"), "HF_TOKEN": token}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), flags, *sources],
        env=environ, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fetch(endpoint: str, source: str, folder: Path, flags: str = "", token: str = "") -> str:
    """What is said of one source."""
    [said] = fetch_all(endpoint, folder, source, flags=flags, token=token)
    return said


def test_an_answer_that_is_none_of_the_hubs_is_said_to_be_unexpected(tmp_path: Path) -> None:
    answers = (b"{", b"[]", b"null", b'{"sha": 1}', b"\xff")
    sources = [f"hf://acme/{number}" for number in range(len(answers))]

    def answer(_method: str, path: str, _headers: Mapping[str, str]) -> Answer:
        number = int(path.removeprefix("/api/models/acme/")[0])
        return 200, {"Content-Type": "application/json"}, answers[number]

    with served(answer) as address:
        said = fetch_all(f"http://{address}", tmp_path / "out", *sources)
    for source, line in zip(sources, said, strict=True):
        assert line.startswith(f"Unavailable {source}: the hub cannot be reached, or gave an unex")


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_the_adapters_files_are_fetched_at_one_commit(
    hub: tuple[Hub, str], tmp_path: Path, revision: str
) -> None:
    assert fetch(hub[1], f"hf://acme/lora{revision}", tmp_path / "out") == (
        "warning image.png, runs/x"
    )
    for name, content in {**FILES, "README.md": b"# hello"}.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert not (tmp_path / "out" / "image.png").exists()
    resolved = [path for path in hub[0].asked if "/resolve/" in path]
    assert resolved and all(f"/resolve/{COMMIT}/" in path for path in resolved)


def test_what_cannot_be_found_is_said(hub: tuple[Hub, str], tmp_path: Path) -> None:
    errors = {
        "hf://acme/other": "NotFound hf://acme/other is not on the hub, or is private",
        "hf://acme/lora@v9": "NotFound",
        "hf://acme": "InvalidRequest DIR: must be hf://ORG/NAME",
        "hf://acme/lora/deep": "InvalidRequest",
        "ftp://acme/lora": "InvalidRequest DIR: must be a folder, or begin with hf://",
    }
    said = fetch_all(hub[1], tmp_path / "out", *errors)
    for (source, error), line in zip(errors.items(), said, strict=True):
        assert line.startswith(error), source


def test_a_gated_repository_says_what_to_do(hub: tuple[Hub, str], tmp_path: Path) -> None:
    hub[0].token = "hf_secret"
    refused = fetch(hub[1], "hf://acme/lora", tmp_path / "a")
    assert refused.startswith("PermissionDenied") and "HF_TOKEN" in refused
    assert "warning" in fetch(hub[1], "hf://acme/lora", tmp_path / "b", token="hf_secret")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("change", ["damage", "longer"])
def test_other_bytes_than_the_hub_lists_are_refused(
    hub: tuple[Hub, str], tmp_path: Path, name: str, change: str
) -> None:
    content = FILES[name]
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    hub[0].sent[name] = damaged if change == "damage" else content * 3
    assert fetch(hub[1], "hf://acme/lora", tmp_path / "out").startswith(f"DataLoss {name}")


def test_files_over_the_limits_are_not_asked_for(hub: tuple[Hub, str], tmp_path: Path) -> None:
    hub[0].files["README.md"] = b"x" * ((1 << 20) + 1)
    out = fetch(hub[1], "hf://acme/lora", tmp_path / "out")
    assert out.startswith("InvalidAdapter README.md: must have at most")
    assert not any("resolve" in path for path in hub[0].asked)


def test_a_pickle_is_fetched_only_to_be_converted(hub: tuple[Hub, str], tmp_path: Path) -> None:
    hub[0].files["adapter_model.bin"] = hub[0].files.pop("adapter_model.safetensors")
    out = fetch(hub[1], "hf://acme/lora", tmp_path / "a")
    assert out.startswith("InvalidAdapter adapter_model.bin") and "--convert" in out
    assert not any("resolve" in path for path in hub[0].asked)
    fetch(hub[1], "hf://acme/lora", tmp_path / "b", "pickled")
    assert (tmp_path / "b" / "adapter_model.bin").exists()


def test_a_hub_that_is_away_is_unavailable(tmp_path: Path) -> None:
    out = fetch("http://127.0.0.1:9", "hf://acme/lora", tmp_path / "out")
    assert out.startswith("Unavailable hf://acme/lora: the hub cannot be reached")
