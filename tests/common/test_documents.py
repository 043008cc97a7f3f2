"""Changes of documents in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.api.registry import TagTarget
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStoreError, PreconditionFailed, WriteUncertain
from loraplex_services.common.objects.file import FileStore
from loraplex_services.registry.publish.tags import TagAddress, moved
from loraplex_services.registry.records import TagRecord

PROD = TagAddress("default", "sql", "prod")
MINE, THEIRS = TagTarget(1, "sha256:1"), TagTarget(2, "sha256:2")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    opened = FileStore(tmp_path)
    yield opened
    await opened.close()


def _moved_to(target: TagTarget, held: TagRecord | None) -> TagRecord:
    return moved(PROD, held, (target,), "tester", f"to-{target.version}")


@pytest.mark.parametrize("exists", [False, True])
async def test_a_change_of_a_document_that_was_just_read_reads_it_no_more(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        await documents.create(store, PROD.key, _moved_to(THEIRS, None))
    seen = await documents.look(store, PROD.key, TagRecord)
    get = store.get
    monkeypatch.setattr(store, "get", None)
    changed = await documents.change(
        store, PROD.key, TagRecord, lambda held: _moved_to(MINE, held), seen=seen
    )
    monkeypatch.setattr(store, "get", get)
    assert changed is not None and changed.generation == 1 + exists
    found = await documents.read(store, PROD.key, TagRecord)
    assert found is not None and found.targets == (MINE,)


@pytest.mark.parametrize("exists", [False, True])
async def test_a_document_that_others_changed_since_it_was_read_is_read_again(
    store: FileStore, exists: bool
) -> None:
    if exists:
        await documents.create(store, PROD.key, _moved_to(MINE, None))
    seen = await documents.look(store, PROD.key, TagRecord)
    await documents.change(store, PROD.key, TagRecord, lambda held: _moved_to(THEIRS, held))
    changed = await documents.change(
        store, PROD.key, TagRecord, lambda held: _moved_to(MINE, held), seen=seen
    )
    assert changed is not None and changed.generation == 2 + exists
    assert [move.targets for move in changed.moves[-2:]] == [(THEIRS,), (MINE,)]


async def test_that_nothing_is_to_change_is_never_concluded_from_what_was_read_before(
    store: FileStore,
) -> None:
    seen = await documents.look(store, PROD.key, TagRecord)
    await documents.create(store, PROD.key, _moved_to(THEIRS, None))

    def only_if_there(held: TagRecord | None) -> TagRecord | None:
        return _moved_to(MINE, held) if held is not None else None

    changed = await documents.change(store, PROD.key, TagRecord, only_if_there, seen=seen)
    assert changed is not None and changed.targets == (MINE,)


@pytest.mark.parametrize("failure", [WriteUncertain, PreconditionFailed, ObjectStoreError])
async def test_the_failure_of_what_a_write_waits_for_ends_it_at_once(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, failure: type[ObjectStoreError]
) -> None:
    """It must not pass for a failure of the write itself, which would be tried again."""

    async def never_again(attempt: int) -> None:
        assert attempt == 0

    monkeypatch.setattr(documents, "_pause", never_again)
    record, others = _moved_to(MINE, None), asyncio.get_running_loop().create_future()
    waiting = [
        asyncio.ensure_future(documents.create(store, PROD.key, record, after=others)),
        asyncio.ensure_future(
            documents.change(store, PROD.key, TagRecord, lambda held: record, after=others)
        ),
    ]
    await asyncio.sleep(0)
    others.set_exception(failure("another document"))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results == [others.exception()] * 2
    assert await documents.read(store, PROD.key, TagRecord) is None
