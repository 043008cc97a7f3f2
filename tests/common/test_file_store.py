"""Objects in a folder: what is true of them only."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common.objects import ObjectStoreError, open_store
from loraplex_services.common.objects.file import FileStore


async def test_listing_a_deep_prefix_reads_no_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed, scandir = FileStore(tmp_path), [], os.scandir
    for name in ("a", "b", "c"):
        await store.put(f"adapters/acme/{name}/tags/prod.json", b"x")

    def noted(folder: Path) -> Iterator[os.DirEntry[str]]:
        listed.append(Path(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", noted)
    assert await store.get_folder("adapters/acme/b/") == [("adapters/acme/b/tags/prod.json", b"x")]
    assert listed == [tmp_path / "adapters/acme/b", tmp_path / "adapters/acme/b/tags"]
    assert [info.key async for info in store.list_objects("../objects/")] == []


@pytest.mark.hostile
async def test_a_write_that_fails_leaves_no_bytes_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    etag = await store.put_if_absent("document", b"first")
    for write in (
        store.put("document/below", b"bytes"),
        store.put_if_absent("document/below", b"bytes"),
        store.put_if_match("document", b"bytes", f"not {etag}"),
    ):
        with pytest.raises(ObjectStoreError):
            await write
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_a_new_folder_of_objects_is_the_user_s_alone(tmp_path: Path) -> None:
    FileStore(tmp_path / "state" / "objects")
    assert (tmp_path / "state" / "objects").stat().st_mode & 0o777 == 0o700


@pytest.mark.hostile
@pytest.mark.parametrize("mode", [0o755, 0o750])
def test_a_folder_of_objects_that_others_may_read_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects").chmod(mode)
    FileStore(tmp_path / "objects")
    assert ("may read the objects" in caplog.text) == (mode == 0o755)


async def test_objects_on_a_read_only_mount_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await FileStore(tmp_path).put("a", b"x")
    (tmp_path / ".tmp").rmdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    mounted = FileStore(tmp_path)
    assert (await mounted.get("a")).data == b"x"
    with pytest.raises(ObjectStoreError):
        await mounted.put("b", b"x")
    with pytest.raises(ObjectStoreError, match="Read-only file system"):
        FileStore(tmp_path / "missing")


def test_a_folder_that_cannot_be_made_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_OBJECTS.*name one .* or a bucket"):
        open_store(f"file://{tmp_path}/file/objects")
