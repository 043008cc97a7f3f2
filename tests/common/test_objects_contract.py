"""One suite, both stores: what services may rely on when they hold an ObjectStore."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from loraplex_services.common.objects import (
    ObjectMissing,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    Segment,
    WriteUncertain,
    open_store,
    read_chunks,
)
from loraplex_services.common.objects.file import FileStore
from loraplex_services.common.objects.probe import probe
from loraplex_services.common.objects.store import BLOBS
from tests.s3_servers import FILE_AND_S3, moto, new_bucket, objects_url_of, proven_store


@pytest.fixture(scope="module")
def moto_server() -> Iterator[dict[str, str]]:
    with moto() as variables:
        yield variables


@pytest.fixture(params=["moto", *FILE_AND_S3])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    if request.param == "moto":
        for name, value in request.getfixturevalue("moto_server").items():
            monkeypatch.setenv(name, value)
        opened = open_store(f"s3://{new_bucket()}/some/prefix")
    else:
        opened = await proven_store(objects_url_of(request.param, tmp_path))
    yield opened
    await opened.close()


async def _write_blob(store: ObjectStore, key: str, data: bytes) -> None:
    writer = store.writer()
    for begin in range(0, len(data), 1 << 20):
        await writer.write(data[begin : begin + (1 << 20)])
    await writer.commit(key)


async def test_a_safe_store_passes_the_probe_and_is_left_empty(store: ObjectStore) -> None:
    await probe(store)
    assert [info async for info in store.list_objects("")] == []


async def test_a_missing_object_is_missing_in_every_way_of_reading(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        await store.get("no/such")
    with pytest.raises(ObjectMissing):
        await store.get_range("no/such", 0, 1)
    with pytest.raises(ObjectMissing):
        await store.compose("x", [Segment("no/such", 0, 1, whole=True)])
    assert await store.head("no/such") is None
    assert await store.get_many(["no/such"]) == [None]
    await store.delete("no/such")


async def test_only_the_first_creator_of_a_document_wins(store: ObjectStore) -> None:
    await store.put_if_absent("docs/a.json", b"first")
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent("docs/a.json", b"second")
    assert (await store.get("docs/a.json")).data == b"first"


async def test_the_creator_of_a_blob_hears_of_one_with_the_same_bytes(store: ObjectStore) -> None:
    """It may be old, and about to be collected."""
    key = f"{BLOBS}ab/cd"
    await store.put_if_absent(key, b"same")
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent(key, b"same")


async def test_an_object_that_need_not_be_durable_is_visible_and_replaces_nothing(
    store: ObjectStore,
) -> None:
    await store.put_if_absent("blobs/a", b"first", durable=False)
    with pytest.raises(PreconditionFailed):
        await store.put_if_absent("blobs/a", b"second", durable=False)
    assert await store.make_durable("blobs/a")
    assert (await store.get("blobs/a")).data == b"first"
    assert not await store.make_durable("blobs/b")


async def test_a_change_that_need_not_be_durable_is_conditional(store: ObjectStore) -> None:
    first = await store.put_if_absent("docs/d.json", b"1", durable=False)
    await store.put_if_match("docs/d.json", b"2", first, durable=False)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("docs/d.json", b"3", first, durable=False)
    assert (await store.get("docs/d.json")).data == b"2"


async def test_only_the_bytes_of_a_document_that_need_not_be_durable_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = FileStore(tmp_path), []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    etag = await store.put_if_absent("docs/new/a.json", b"1", durable=False)
    await store.put_if_match("docs/new/a.json", b"2", etag, durable=False)
    assert synced == [False, False]
    await store.put_if_absent(f"{BLOBS}ab/cd", b"1", durable=False)
    assert synced == [False, False]
    await store.put_if_absent("docs/other/a.json", b"1")
    assert synced[2:].count(False) == 1 and synced[2:].count(True) >= 2
    synced.clear()
    await store.delete("docs/new/a.json", durable=False)
    assert synced == []
    await store.delete("docs/other/a.json")
    assert synced == [True]
    await store.close()


async def test_of_many_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    async def create(racer: int) -> int | None:
        try:
            await store.put_if_absent("docs/race.json", b"%d" % racer)
            return racer
        except (PreconditionFailed, WriteUncertain):
            return None

    winners = [w for w in await asyncio.gather(*map(create, range(12))) if w is not None]
    assert len(winners) == 1
    assert (await store.get("docs/race.json")).data == b"%d" % winners[0]


async def test_a_document_changes_only_under_its_current_etag(store: ObjectStore) -> None:
    first = await store.put_if_absent("docs/b.json", b"1")
    second = await store.put_if_match("docs/b.json", b"2", first)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("docs/b.json", b"3", first)
    stored = await store.get("docs/b.json")
    assert (stored.data, stored.etag) == (b"2", second)


async def test_a_document_that_is_gone_cannot_be_replaced(store: ObjectStore) -> None:
    etag = await store.put_if_absent("docs/c.json", b"1")
    await store.delete("docs/c.json")
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("docs/c.json", b"2", etag)


async def test_concurrent_additions_by_compare_and_set_lose_none(store: ObjectStore) -> None:
    await store.put_if_absent("docs/names", b"nobody")

    async def add(name: bytes) -> None:
        while name not in (stored := await store.get("docs/names")).data.split():
            with contextlib.suppress(PreconditionFailed, WriteUncertain):
                await store.put_if_match("docs/names", stored.data + b" " + name, stored.etag)

    names = [b"%d" % number for number in range(10)]
    await asyncio.gather(*map(add, names))
    assert sorted((await store.get("docs/names")).data.split()) == [*names, b"nobody"]


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (16 << 20) + 3, (32 << 20)])
async def test_blobs_of_any_size_come_back_as_written(store: ObjectStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    await _write_blob(store, "blobs/x", data)
    info = await store.head("blobs/x")
    assert info is not None and info.size == size
    read = b"".join([chunk async for chunk in read_chunks(store, "blobs/x", 0, size)])
    assert read == data
    assert await store.get_range("blobs/x", size, 10) == b""


async def test_nothing_is_visible_of_a_blob_before_its_commit(store: ObjectStore) -> None:
    writer = store.writer()
    await writer.write(b"half")
    assert await store.head("blobs/y") is None
    await writer.abort()
    assert [info async for info in store.list_objects("")] == []


async def test_a_short_object_is_noticed_when_read_in_chunks(store: ObjectStore) -> None:
    await store.put("blobs/short", b"12345")
    with pytest.raises(ObjectStoreError, match="ends at byte 5"):
        async for _ in read_chunks(store, "blobs/short", 2, 10):
            pass


async def test_compose_joins_runs_of_several_objects(store: ObjectStore) -> None:
    await store.put("parts/1", b"abcdef")
    await store.put("parts/2", b"ghijkl")
    await store.compose(
        "blobs/joined",
        [Segment("parts/1", 0, 6, whole=True), Segment("parts/2", 2, 3, whole=False)],
    )
    assert (await store.get("blobs/joined")).data == b"abcdefijk"


async def test_composing_a_whole_object_again_survives_its_source(store: ObjectStore) -> None:
    await store.put("parts/1", b"abcdef")
    for _ in range(2):
        await store.compose("blobs/copy", [Segment("parts/1", 0, 6, whole=True)])
    await store.delete("parts/1")
    assert (await store.get("blobs/copy")).data == b"abcdef"
    assert [info.key async for info in store.list_objects("")] == ["blobs/copy"]


async def test_listing_is_ordered_by_whole_key_and_resumes_anywhere(store: ObjectStore) -> None:
    keys = sorted(["a/b/1", "a-b/1", "a.b/1", "a/b-c/2", "a/b", "b/0", "a/bc", "a0"])
    keys.remove("a/b")  # a folder and a file of one name cannot both be on a disk
    for key in keys:
        await store.put(key, b"x")
    assert [info.key async for info in store.list_objects("")] == keys
    for prefix in ("a", "a/", "a/b", "a/b/", "zzz"):
        expected = [key for key in keys if key.startswith(prefix)]
        assert [info.key async for info in store.list_objects(prefix)] == expected
        for after in keys:
            rest = [info.key async for info in store.list_objects(prefix, start_after=after)]
            assert rest == [key for key in expected if key > after]


@pytest.mark.long
async def test_listing_pages_through_more_than_one_thousand(store: ObjectStore) -> None:
    keys = [f"many/{number:05d}" for number in range(1003)]
    for begin in range(0, len(keys), 100):
        await asyncio.gather(*(store.put(key, b"x") for key in keys[begin : begin + 100]))
    assert [info.key async for info in store.list_objects("many/")] == keys


async def test_a_rewritten_object_is_not_deleted_for_its_old_age(store: ObjectStore) -> None:
    await store.put("blobs/z", b"data")
    info = await store.head("blobs/z")
    assert info is not None
    assert not await store.delete_if_older("blobs/z", info.modified_s - 10)
    assert await store.delete_if_older("blobs/z", info.modified_s)
    assert await store.head("blobs/z") is None


async def test_the_clock_agrees_with_the_times_of_objects(store: ObjectStore) -> None:
    before = await store.clock_s()
    await store.put("blobs/t", b"data")
    info = await store.head("blobs/t")
    after = await store.clock_s()
    assert info is not None
    assert int(before) <= int(info.modified_s) <= int(after) + 1


async def test_writing_again_renews_the_age_of_a_blob(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/objects")
    await store.put("parts/1", b"data")
    await store.compose("blobs/a", [Segment("parts/1", 0, 4, whole=True)])
    long_ago = time.time() - 1e6
    os.utime(tmp_path / "objects/blobs/a", (long_ago, long_ago))
    await store.compose("blobs/a", [Segment("parts/1", 0, 4, whole=True)])
    info = await store.head("blobs/a")
    assert info is not None and info.modified_s > long_ago + 1000


async def test_a_blob_that_the_disk_refused_half_way_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync is reported once: a later one that succeeds says nothing of the lost bytes."""
    store = open_store(f"file://{tmp_path}/objects")
    fsync, calls = os.fsync, []

    def failing_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    writer = store.writer()
    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(ObjectStoreError):
        for _ in range(2):
            await writer.write(bytes(17 << 20))
        await writer.commit("blobs/x")
    await writer.abort()
    assert calls
    assert [info async for info in store.list_objects("")] == []


async def test_errors_that_clients_read_do_not_show_the_servers_paths(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/objects")
    (tmp_path / "objects/.tmp").rmdir()

    async def stream() -> None:
        await store.writer().commit("blobs/x")

    for writing in (store.put("a", b"x"), store.put_if_absent("b", b"x"), stream()):
        with pytest.raises(ObjectStoreError, match="No such file or directory") as refused:
            await writing
        assert str(tmp_path) not in refused.value.message


@pytest.mark.parametrize("key", ["../x", "a/../b", "/abs", "a//b", ".tmp/x", "a/.hidden", "", "ä"])
async def test_keys_that_could_leave_the_folder_are_refused(tmp_path: Path, key: str) -> None:
    store = open_store(f"file://{tmp_path}/objects")
    with pytest.raises(ObjectStoreError):
        await store.put(key, b"x")


async def test_foreign_files_in_the_folder_are_left_out_of_listings(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "objects" / "my notes.txt").write_bytes(b"x")
    store = open_store(f"file://{tmp_path}/objects")
    await store.put("a/b", b"x")
    assert [info.key async for info in store.list_objects("")] == ["a/b"]


@pytest.mark.hostile
@pytest.mark.parametrize("composes", [True, False], ids=["compose", "put"])
async def test_write_that_a_full_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composes: bool
) -> None:
    store = open_store(tmp_path.as_uri())
    for key in ("a", "b"):
        await store.put_if_absent(key, b"x" * 1000)

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in ("file", "durable"):
        monkeypatch.setattr(f"loraplex_services.common.objects.{module}.write_all", full)
    for _ in range(3):
        with pytest.raises(ObjectStoreError):
            if composes:
                await store.compose("c", [Segment(key, 0, 500, False) for key in ("a", "b")])
            else:
                await store.put_if_absent("c", b"y")
    assert [path for path in (tmp_path / ".tmp").iterdir() if path.is_file()] == []


@pytest.mark.hostile
async def test_reads_do_not_wait_for_writes_that_the_disk_holds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    await store.put("read", b"x")
    goes_on = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor: goes_on.wait())
    writes = [asyncio.create_task(store.put(f"written-{n}", b"y")) for n in range(100)]
    await asyncio.sleep(0)
    assert (await store.get("read")).data == b"x"
    assert not any(write.done() for write in writes)
    goes_on.set()
    await asyncio.gather(*writes)
