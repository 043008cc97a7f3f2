"""Whatever the pace of the store: nothing refers to what is not there yet, and what a crash would
leave can be completed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectInfo
from loraplex_services.common.objects.file import FileStore
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.uploads import Options
from loraplex_services.registry.records import TagRecord, VersionRecord
from tests.registry.house import TENSORS, adapter_files, declared, house_of, one_chunk, opened

PAUSES_S = (0.0, 0.0, 0.002, 0.02)
NAMES = ("sql", "mail")
NUM_UPDATES = 4


class UnevenStore(FileStore):
    """Every write takes another time, before it has an effect and after it."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root)
        self._random = random.Random(seed)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.choice(PAUSES_S))

    async def put(self, key: str, data: bytes, **options: Any) -> None:
        await self._pause()
        await super().put(key, data, **options)
        await self._pause()

    async def put_if_absent(self, key: str, data: bytes, **options: Any) -> str:
        await self._pause()
        etag = await super().put_if_absent(key, data, **options)
        await self._pause()
        return etag

    async def put_if_match(self, key: str, data: bytes, etag: str, **options: Any) -> str:
        await self._pause()
        etag = await super().put_if_match(key, data, etag, **options)
        await self._pause()
        return etag


class StalledStore(FileStore):
    """Reads and lists of the parts of uploads wait, each from a place that the test chooses."""

    def __init__(self, root: Path, stalled: str) -> None:
        super().__init__(root)
        self._stalled = stalled
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def _stall(self, method: str, key: str) -> None:
        if method == self._stalled and "/parts/" in key:
            self.reached.set()
            await self.go_on.wait()

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        await self._stall("get_range", key)
        return await super().get_range(key, offset, length)

    async def list_objects(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._stall("list_objects", prefix)
        async for info in super().list_objects(prefix, start_after):
            yield info


@pytest.fixture
async def registry(
    request: pytest.FixtureRequest, tmp_path: Path, metadata_url: str
) -> AsyncIterator[Registry]:
    """Its store is as uneven as the test's parameter `seed` says."""
    store = UnevenStore(tmp_path / "objects", request.getfixturevalue("seed"))
    async with house_of(store, metadata_url) as assembled:
        yield assembled
    await store.close()


async def _found(registry: Registry) -> tuple[list[TagRecord], list[VersionRecord]]:
    """All tags, and after these all versions."""
    records: list[Any] = []
    for part, cls in (("/tags/", TagRecord), ("/versions/", VersionRecord)):
        found = await registry.store.get_folder(layout.ADAPTERS)
        records.append(documents.intact(cls, [each for each in found if part in each[0]]))
    return records[0], records[1]


async def _keys(registry: Registry, prefix: str) -> set[str]:
    return {info.key async for info in registry.store.list_objects(prefix)}


async def _check(registry: Registry, *, durable: bool) -> None:
    """Referrers are read before what they refer to, so that what is missing was missing then."""
    tags, versions = await _found(registry)
    blobs = await _keys(registry, layout.BLOBS)
    by_number = {(each.name, each.version): each for each in versions}
    for tag in tags:
        for target in tag.targets:
            assert by_number[tag.name, target.version].digest == target.digest
    for version in versions:
        digests = (version.digest, *(file.sha256 for file in version.files))
        assert {layout.blob(digest) for digest in digests} <= blobs
    if durable:
        await _check_can_be_completed(registry, versions)


async def _check_can_be_completed(registry: Registry, versions: list[VersionRecord]) -> None:
    """A version whose intent is gone has its tags, unless newer ones have them."""
    intents = await _keys(registry, layout.UPLOADS)
    tags, _ = await _found(registry)
    for version in versions:
        upload_id = version.upload_id
        if intents.isdisjoint({layout.lone_intent(upload_id), layout.upload_intent(upload_id)}):
            own = {tag.tag: tag for tag in tags if tag.name == version.name}
            for name in ("latest", "prod"):
                assert own[name].targets[0].version >= version.version


WAYS = [(True, 0.0), (False, 0.0), (True, 60.0)]
"""In one call, and for how long in seconds, 0 = for good."""


@pytest.mark.parametrize(
    ("in_one_call", "ttl_s", "seed"),
    [
        pytest.param(*way, seed, marks=[pytest.mark.long] * (seed != own_seed))
        for own_seed, way in enumerate(WAYS)
        for seed in range(len(WAYS))
    ],
)
async def test_at_no_time_does_anything_refer_to_what_is_missing(
    registry: Registry, in_one_call: bool, ttl_s: float, seed: int
) -> None:
    tags = ("latest", "prod")
    request_ids = itertools.count()

    async def update(name: str, seed: int) -> None:
        files = adapter_files(seed)
        if in_one_call:
            options = Options("default", name, tags, ttl_s=ttl_s)
            request_id = f"{next(request_ids):016x}"
            session = registry.uploads.in_one_call(options, declared(files), "me", request_id)
            await registry.publisher.publish(session, files)
        else:
            session = await opened(registry, name, files, "prod", ttl_s=ttl_s)
            await registry.publisher.finish(session)

    async def train(name: str, begin: int) -> None:
        for seed in range(begin, begin + NUM_UPDATES):
            await update(name, seed)

    trainers = [
        asyncio.create_task(train(name, begin)) for name in NAMES for begin in (1, 1 + NUM_UPDATES)
    ]
    while not all(trainer.done() for trainer in trainers):
        await _check(registry, durable=not ttl_s)
    await asyncio.gather(*trainers)
    found, versions = await _found(registry)
    assert len(versions) == len(NAMES) * 2 * NUM_UPDATES
    newest = {tag.targets[0].version for tag in found}
    assert newest == {2 * NUM_UPDATES}, "every tag is at the last of its adapter's versions"


@pytest.mark.parametrize("stalled", ["list_objects", "get_range"])
async def test_a_call_whose_session_another_registry_finishes_meanwhile_gives_the_same_answer(
    tmp_path: Path, metadata_url: str, stalled: str
) -> None:
    quick = FileStore(tmp_path / "objects")
    slow = StalledStore(tmp_path / "objects", stalled)
    async with house_of(quick, metadata_url) as first, house_of(slow, metadata_url) as second:
        tensors = adapter_files(1)[TENSORS]
        session = await opened(first, "sql", adapter_files(1))
        await first.uploads.reopen(session.upload_id, TENSORS)
        for offset, data in ((0, tensors[:100]), (100, tensors[100:])):
            await first.uploads.receive(session, TENSORS, offset, one_chunk(data))
        late = asyncio.create_task(second.publisher.finish(session))
        await asyncio.wait_for(slow.reached.wait(), 20)
        done = await first.publisher.finish(session)
        slow.go_on.set()
        assert await late == done
    await quick.close()
    await slow.close()
