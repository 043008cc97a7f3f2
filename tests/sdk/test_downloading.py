"""Downloads are whole and true, or leave nothing behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import AlreadyExists, DataLoss, InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from tests.sdk.servers import ScriptedDownload, serving


def _spec(path: str, content: bytes) -> pb.FileSpec:
    return pb.FileSpec(path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest())


async def _pull(
    folder: Path,
    files: Sequence[pb.FileSpec],
    chunks: Sequence[pb.FileChunk],
    force: bool = False,
) -> None:
    async with (
        serving(ScriptedDownload(files, chunks)) as address,
        RegistryClient(address, Credentials()) as client,
    ):
        await client.pull("a", folder, force=force)


async def test_writes_files_that_arrive_in_chunks(tmp_path: Path) -> None:
    files = [_spec("a.json", b"abcdef"), _spec("b.bin", b"")]
    chunks = [
        pb.FileChunk(path="a.json", offset=0, data=b"abc"),
        pb.FileChunk(path="a.json", offset=3, data=b"def"),
    ]
    await _pull(tmp_path / "x", files, chunks)
    assert (tmp_path / "x" / "a.json").read_bytes() == b"abcdef"
    assert (tmp_path / "x" / "b.bin").read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [pb.FileChunk(path="a", offset=0, data=b"abd")],
        [pb.FileChunk(path="a", offset=1, data=b"bc")],
        [pb.FileChunk(path="a", offset=0, data=b"abcd")],
        [pb.FileChunk(path="other", offset=0, data=b"abc")],
    ],
    ids=["missing", "changed", "gap", "too-long", "unlisted"],
)
async def test_damage_is_data_loss_and_leaves_nothing(
    tmp_path: Path, chunks: list[pb.FileChunk]
) -> None:
    with pytest.raises(DataLoss):
        await _pull(tmp_path / "x", [_spec("a", b"abc")], chunks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a\\b", ""])
async def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(DataLoss, match="unsafe path"):
        await _pull(tmp_path / "x", [_spec(path, b"")], [])
    assert list(tmp_path.iterdir()) == []


async def test_force_replaces_files_of_the_same_name_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "mine").write_text("mine")
    files, chunks = [_spec("a", b"new")], [pb.FileChunk(path="a", offset=0, data=b"new")]
    with pytest.raises(AlreadyExists, match="--force"):
        await _pull(tmp_path, files, chunks)
    await _pull(tmp_path, files, chunks, force=True)
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "mine").read_text() == "mine"


async def test_a_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file")
    with pytest.raises(InvalidRequest, match="is a file"):
        await _pull(tmp_path / "x", [], [])
