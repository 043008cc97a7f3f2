"""What a new version is numbered by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis.asyncio

from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import catalog as catalog_module
from loraplex_services.registry.index.items import version_item
from loraplex_services.registry.index.redis_calls import PREFIX
from tests.registry.house import publish

OTHER = f"sha256:{64 * '0'}"


async def test_the_index_knows_the_highest_number_and_the_first_version(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    await registry.deletion.version("default", "sql", 3, "tester", force=True, purge=False)
    monkeypatch.setattr(registry.store, "list_objects", None)
    last, num_live, records = await registry.versions.of_content("default", "sql", OTHER)
    assert (last, num_live, [record.version for record in records]) == (3, 2, [1])
    assert await registry.versions.of_content("default", "new", OTHER) == (0, 0, [])


async def test_a_digest_that_a_version_has_is_looked_up_in_the_objects(registry: Registry) -> None:
    versions = [(await publish(registry, "sql", seed)).version for seed in (1, 2, 3)]
    digest = versions[1].digest
    last, num_live, records = await registry.versions.of_content("default", "sql", digest)
    assert (last, num_live, [record.version for record in records]) == (3, 3, [1, 2, 3])


async def test_a_rebuilt_index_knows_how_many_versions_are_not_deleted(registry: Registry) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    await registry.deletion.version("default", "sql", 2, "tester", force=True, purge=False)
    await registry.indexer.rebuild()
    last, num_live, _ = await registry.versions.of_content("default", "sql", OTHER)
    assert (last, num_live) == (3, 2)


async def test_an_index_that_lacks_a_number_is_not_believed(
    registry: Registry, metadata_url: str
) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/sql"
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        await client.hdel(key, "v2")
        await client.hincrby(key, "count", -1)
    last, num_live, records = await registry.versions.of_content("default", "sql", OTHER)
    assert (last, num_live, [record.version for record in records]) == (3, 3, [1, 2, 3])


@pytest.mark.hostile
async def test_versions_are_counted_as_they_come(registry: Registry, metadata_url: str) -> None:
    """Redis serves nobody else while it looks through the versions of an adapter."""
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    await registry.deletion.version("default", "sql", 2, "tester", force=True, purge=False)
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/sql"
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        assert await client.hmget(key, "count", "highest") == [b"3", b"3"]
        await client.hset(key, "count", "7")
        await client.hset(key, "highest", "7")
        assert (await registry.versions.of_content("default", "sql", OTHER))[0] == 7


@pytest.mark.hostile
async def test_the_newest_version_is_known_whatever_was_deleted(
    registry: Registry, metadata_url: str
) -> None:
    """From each live version, the index leads to the next older one."""
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/sql"
    names = f"{PREFIX}{await registry.catalog.epoch()}:names"

    async def delete(*numbers: int) -> None:
        for number in numbers:
            await registry.deletion.version("default", "sql", number, "x", force=True, purge=False)

    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        for seed in range(6):
            await publish(registry, "sql", seed, latest=False)
        await delete(4, 5, 2)
        assert await client.hget(key, "newest") == b"6"
        await delete(6)
        assert await client.hget(key, "newest") == b"3"
        for seed in (7, 8):
            await publish(registry, "sql", seed, latest=False)
        assert await client.hmget(key, "newest", "p7", "p8") == [b"8", b"3", None]
        await delete(7, 8)
        assert await client.hget(key, "newest") == b"3"
        await publish(registry, "sql", 9, latest=False)
        assert await client.hmget(key, "newest", "p9") == [b"9", b"3"]
        await delete(9, 3)
        assert await client.hget(key, "newest") == b"1"
        assert await client.zrange(names, 0, -1) == [b"default/sql"]
        await delete(1)
        assert await client.hget(key, "newest") is None
        assert not await client.zrange(names, 0, -1)
        await publish(registry, "sql", 10, latest=False)
        assert await client.hmget(key, "newest", "p10") == [b"10", b"0"]
        await delete(10)
        assert await client.hget(key, "newest") is None


async def test_a_version_that_comes_late_into_the_index_may_be_the_newest(
    registry: Registry, metadata_url: str
) -> None:
    records = [(await publish(registry, "sql", seed)).version for seed in range(4)]
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/late"
    late = [replace(record, name="late") for record in records]

    async def apply(number: int, generation: int = 1) -> None:
        item = version_item(replace(late[number - 1], generation=generation), None)
        await registry.catalog.apply("default/late", [item])

    for number in (1, 4, 2, 3):
        await apply(number)
    await apply(4, generation=2)
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        assert await client.hget(key, "newest") == b"3"
        await apply(3, generation=2)
        assert await client.hget(key, "newest") == b"2"


@pytest.mark.hostile
async def test_a_version_that_comes_late_is_found_below_versions_that_skip_it(
    registry: Registry, metadata_url: str
) -> None:
    record = (await publish(registry, "sql", 0)).version
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/late"

    async def apply(number: int, generation: int = 1) -> None:
        version = replace(record, name="late", version=number, generation=generation)
        await registry.catalog.apply("default/late", [version_item(version, None)])

    for number in (2, 7, 9, 4, 5):
        await apply(number)
    await apply(4, generation=2)
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        for number, newest in ((9, b"7"), (7, b"5"), (5, b"2"), (2, None)):
            await apply(number, generation=2)
            assert await client.hget(key, "newest") == newest


@pytest.mark.hostile
async def test_deleting_the_newest_two_versions_again_and_again_looks_through_few_others(
    registry: Registry, metadata_url: str
) -> None:
    """The older one first: where the newest leads to is then deleted, as thousands below it are."""
    record = (await publish(registry, "sql", 0)).version
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/many"

    async def apply(number: int, generation: int = 1) -> None:
        version = replace(record, name="many", version=number, generation=generation)
        await registry.catalog.apply("default/many", [version_item(version, None)])

    async with redis.asyncio.Redis.from_url(metadata_url) as client:

        async def num_reads() -> int:
            return int((await client.info("commandstats"))["cmdstat_hget"]["calls"])

        await apply(1)
        for number in range(2, 202, 2):
            await apply(number)
            await apply(number + 1)
            await apply(number, generation=2)
            before = await num_reads()
            await apply(number + 1, generation=2)
            assert await num_reads() - before < 50
            assert await client.hget(key, "newest") == b"1"


@pytest.mark.hostile
async def test_a_deleted_version_takes_little_of_the_memory_of_redis(
    registry: Registry, metadata_url: str
) -> None:
    """It stays, with labels of up to 32 KiB, for as long as the index does."""
    await publish(registry, "sql", 1, labels={"note": 30_000 * "x"})
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/sql"
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        assert await client.hstrlen(key, "v1") > 30_000
        await registry.deletion.version("default", "sql", 1, "x", force=True, purge=False)
        assert await client.hstrlen(key, "v1") < 400


@pytest.mark.hostile
async def test_deleted_versions_are_looked_through_once(
    registry: Registry, metadata_url: str
) -> None:
    """A trainer deletes all but its newest updates, and each one reads those that are left."""
    for seed in range(8):
        await publish(registry, "sql", seed, latest=False)
    for number in (2, 3, 5, 6, 7):
        await registry.deletion.version("default", "sql", number, "x", force=True, purge=False)
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:default/sql"
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        for _ in range(2):
            live = (await registry.catalog.find("default/sql", "live")).versions
            assert [version.version for version in live] == [1, 4, 8]
            assert await client.hmget(key, "p8", "p4") == [b"4", b"1"]


async def test_a_version_that_is_indexed_between_two_parts_of_a_read_stays_reachable(
    registry: Registry, metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose registry crashed before that, and that another one completes."""
    published = [(await publish(registry, "sql", seed, latest=False)) for seed in range(6)]
    late, scope = version_item(published[3].version, None), "default/sql"
    key = f"{PREFIX}{await registry.catalog.epoch()}:a:{scope}"

    async def delete(*numbers: int) -> None:
        for number in numbers:
            await registry.deletion.version("default", "sql", number, "x", force=True, purge=False)

    async def live() -> list[int]:
        found = await registry.catalog.find(scope, "live")
        return [version.version for version in found.versions]

    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        await client.hdel(key, "v4")
    await delete(3, 5)
    assert await live() == [1, 2, 6]
    await delete(2)
    ask, answers = registry.catalog._lookups.ask, list[object]()

    async def ask_and_index(wanted: tuple[str, str, str]) -> object:
        answers.append(await ask(wanted))
        if len(answers) == 1:
            await registry.catalog.apply(scope, [late])
        return answers[-1]

    monkeypatch.setattr(catalog_module, "MAX_VERSIONS_AT_ONCE", 1)
    monkeypatch.setattr(registry.catalog._lookups, "ask", ask_and_index)
    await live()
    assert len(answers) > 1
    assert await live() == [1, 4, 6]
