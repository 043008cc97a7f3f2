"""A copy of all documents plus what is newer equals a full read, after whatever happened."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.found import Found
from loraplex_services.registry.maintenance import housekeeping
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.maintenance.housekeeping import copy_if_due
from loraplex_services.registry.maintenance.snapshots import Snapshots
from tests.registry.house import ANY_AGE_S, TENSORS, house_of, orphans, publish
from tests.s3_servers import FILE_AND_S3, moto, new_bucket, objects_url_of, proven_store

TURNS = 40


@pytest.fixture(scope="module")
def moto_server() -> Iterator[dict[str, str]]:
    with moto() as variables:
        yield variables


@pytest.fixture(params=["moto", FILE_AND_S3[1]])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    """A store that lists etags."""
    if request.param == "moto":
        for name, value in request.getfixturevalue("moto_server").items():
            monkeypatch.setenv(name, value)
        opened = open_store(f"s3://{new_bucket()}/house")
    else:
        opened = await proven_store(objects_url_of("s3", tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def house(store: ObjectStore, metadata_url: str) -> AsyncIterator[Registry]:
    async with house_of(store, metadata_url) as assembled:
        yield assembled


async def _full_read(store: ObjectStore) -> list[tuple[str, bytes]]:
    keys = [info.key async for info in store.list_objects(layout.ADAPTERS)]
    found = zip(keys, await store.get_many(keys), strict=True)
    return [(key, data) for key, data in found if data is not None]


async def _by_snapshot(store: ObjectStore) -> list[tuple[str, bytes]]:
    return [found async for batch in Snapshots(store).documents() for found in batch]


async def _snapshot_keys(store: ObjectStore) -> list[str]:
    return [info.key async for info in store.list_objects(layout.SNAPSHOTS)]


class History:
    """Random changes of documents and of snapshots, legal and not."""

    def __init__(self, store: ObjectStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._old: list[tuple[str, bytes]] = []

    def _key(self) -> str:
        name = self._rng.choice(["a", "a-b", "a.b", "ab", "b"])
        return layout.version("default", name, self._rng.randrange(1, 4))

    async def change(self) -> None:
        key, data = self._key(), secrets.token_bytes(self._rng.randrange(8, 90))
        info = await self._store.head(key)
        if info is None:
            await self._store.put_if_absent(key, data)
        else:
            await self._store.put_if_match(key, data, (await self._store.get(key)).etag)

    async def delete(self) -> None:
        await self._store.delete(self._key())

    async def copy(self) -> None:
        key = await Snapshots(self._store).write()
        self._old.append((key, (await self._store.get(key)).data))

    async def copy_of_the_past(self) -> None:
        """Another registry was slow: an old snapshot comes late and leads the list."""
        if self._old:
            key, data = self._rng.choice(self._old)
            late = layout.snapshot("7" + "z" * 25, layout.sha256_of_snapshot(key))
            await self._store.put(late, data)
            for other in await _snapshot_keys(self._store):
                if other != late:
                    await self._store.delete(other)

    async def damage(self) -> None:
        for key in await _snapshot_keys(self._store):
            data = bytearray((await self._store.get(key)).data)
            if data and self._rng.random() < 0.5:
                data[self._rng.randrange(len(data))] ^= 1
                await self._store.put(key, bytes(data[: self._rng.randrange(len(data)) + 1]))


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_snapshot_and_newer_objects_equal_a_full_read_after_any_history(
    store: ObjectStore, seed: int
) -> None:
    rng = random.Random(seed)
    history = History(store, rng)
    for turn in range(TURNS):
        kinds = ["change"] * 6 + ["delete", "copy", "copy_of_the_past", "damage"]
        await getattr(history, rng.choice(kinds))()
        if turn % 4 == 3:
            assert await _by_snapshot(store) == await _full_read(store)


def _note_reads(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of all documents that are read from now on."""
    read: list[str] = []
    get_many = store.get_many

    async def noting(wanted: Sequence[str]) -> list[bytes | None]:
        read.extend(wanted)
        return await get_many(wanted)

    monkeypatch.setattr(store, "get_many", noting)
    return read


async def test_what_was_copied_is_not_read_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [layout.version("default", f"a{number}", 1) for number in range(30)]
    for key in keys:
        await store.put_if_absent(key, key.encode())
    await Snapshots(store).write()
    await store.put_if_match(keys[3], b"newer", (await store.get(keys[3])).etag)
    await store.delete(keys[5])
    read = _note_reads(store, monkeypatch)
    found = dict(await _by_snapshot(store))
    assert read == [keys[3]]
    assert found[keys[3]] == b"newer" and keys[5] not in found and len(found) == 29


async def test_collecting_reads_what_no_copy_tells_and_keeps_what_versions_need(
    house: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await publish(house, "sql", 1)
    for seed in (2, 3):
        await publish(house, "sql", seed, "prod")
    await Snapshots(house.store).write()
    await house.deletion.version("default", "sql", 1, "", force=True, purge=True)
    await publish(house, "sql", 4)
    read = _note_reads(house.store, monkeypatch)
    before = {info.key async for info in house.store.list_objects(layout.BLOBS)}
    await Collector(house.store, min_age_s=ANY_AGE_S).collect()
    assert read == [layout.version("default", "sql", number) for number in (1, 4)]
    after = {info.key async for info in house.store.list_objects(layout.BLOBS)}
    weights = next(file for file in first.version.files if file.path == TENSORS)
    assert before - after == {layout.blob(weights.sha256), layout.blob(first.version.digest)}
    assert await orphans(house) == set()


async def test_snapshots_of_many_registries_leave_the_two_newest(store: ObjectStore) -> None:
    await store.put_if_absent(layout.version("default", "a", 1), b"one")
    written = [await Snapshots(store).write() for _ in range(4)]
    kept = await _snapshot_keys(store)
    assert len(kept) == 2 and set(kept) <= set(written)
    assert await _by_snapshot(store) == await _full_read(store)


async def test_a_lost_index_comes_back_from_a_snapshot_and_what_is_newer(
    house: Registry, metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def everything() -> list[Found]:
        return [await house.catalog.find(scope, "all") for scope in ("default/sql", "acme/chat")]

    async def etags() -> set[tuple[str, str]]:
        return {(info.key, info.etag) async for info in house.store.list_objects(layout.ADAPTERS)}

    await publish(house, "sql", 1, "prod")
    await publish(house, "acme/chat", 2)
    assert await copy_if_due(house.catalog, house.snapshots)
    copied = await etags()
    await publish(house, "sql", 3, "prod")
    await house.deletion.adapter("acme", "chat", "", purge=False)
    before, newer = await everything(), await etags() - copied
    read = _note_reads(house.store, monkeypatch)
    client = connect_redis(metadata_url)
    await client.flushall()
    await client.aclose()
    await house.indexer.ensure()
    assert {key for key in read if key.startswith(layout.ADAPTERS)} == {key for key, _ in newer}
    assert 0 < len(newer) < len(await etags())
    assert await everything() == before


async def test_a_copy_is_due_after_many_changes_and_for_every_new_index(
    house: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SNAPSHOT_CHANGES", 4)
    assert await copy_if_due(house.catalog, house.snapshots)
    assert not await copy_if_due(house.catalog, house.snapshots)
    for seed in range(3):
        await publish(house, "sql", seed)
    assert await copy_if_due(house.catalog, house.snapshots)
    assert not await copy_if_due(house.catalog, house.snapshots)
    await house.indexer.rebuild()
    assert await copy_if_due(house.catalog, house.snapshots)


def test_folders_are_read_plainly(tmp_path: Path) -> None:
    assert not Snapshots(open_store(f"file://{tmp_path}/objects")).are_useful
