"""What is deleted by itself, and what stays."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.errors import NotFound
from loraplex_services.common.ulid import ulid
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import FileRecord, Files
from loraplex_services.gateway.batches.records import BatchRecord
from loraplex_services.gateway.batches.storage import Storage
from loraplex_services.gateway.batches.sweep import Sweeper

DAY_S = 24 * 3600.0


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    made = Storage((tmp_path / "objects").as_uri())
    yield made
    await made.close()


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def stored(files: Files, tenant: str, created_s: float, expires_s: float) -> FileRecord:
    file_id = f"file-{ulid(created_s)}"
    await files.write(tenant, file_id, chunks(b"x"))
    record = FileRecord(file_id, tenant, "f", "batch", 1, int(created_s), int(expires_s))
    await files.add(record)
    return record


async def test_only_files_that_expired_long_ago_are_swept(storage: Storage) -> None:
    files, now_s = Files(storage), time.time()
    begin_s = now_s - 20 * DAY_S
    kept = [
        await stored(files, "a", begin_s, now_s + DAY_S),
        await stored(files, "a", begin_s, 0),
        await stored(files, "b", now_s, now_s + DAY_S),
    ]
    # A batch may still read it, though nobody sees it any more.
    recent = await stored(files, "b", begin_s, now_s - 3600)
    gone = [
        await stored(files, "a", begin_s, now_s - 2 * DAY_S),
        await stored(files, "c", begin_s, now_s - 2 * DAY_S),
    ]
    assert await Sweeper(storage).sweep() == len(gone)
    for record in kept:
        assert await files.get(record.tenant, record.file_id) == record
    assert [chunk async for chunk in files.read(recent)] == [b"x"]
    for record in gone:
        with pytest.raises(NotFound):
            _ = [chunk async for chunk in files.read(record)]
    assert await Sweeper(storage).sweep() == 0


async def test_batches_are_kept_as_long_as_their_files_may_be(storage: Storage) -> None:
    book, now_s = BatchBook(storage), time.time()
    ages = {"old": 33 * DAY_S, "recent": 31 * DAY_S, "new": 0.0}
    ids = {name: f"batch_{ulid(now_s - age_s)}" for name, age_s in ages.items()}
    for batch_id in ids.values():
        await book.create(BatchRecord(batch_id, "a", "", (), "/v1/completions", "f", 0, 3600), ())
    assert await Sweeper(storage).sweep() == 1
    left = book.listed(await book.documents("a"))
    assert [record.batch_id async for record in left] == [ids["recent"], ids["new"]]


async def test_an_upload_whose_gateway_was_killed_is_swept_after_a_day(
    storage: Storage, tmp_path: Path
) -> None:
    files = Files(storage)
    old, new = f"file-{ulid(0.0)}", f"file-{ulid(time.time())}"
    for file_id in (old, new):
        await files.write("a", file_id, chunks(b"x"))
    [segment] = (tmp_path / "objects" / "files" / "a" / "contents" / old).iterdir()
    long_ago_s = time.time() - 2 * DAY_S
    os.utime(segment, (long_ago_s, long_ago_s))
    assert await Sweeper(storage).sweep() == 1
    assert not segment.exists()
    assert (segment.parents[1] / new).exists()
