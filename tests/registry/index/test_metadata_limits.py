"""A metadata server, full, read-only, or set to drop keys: reported plainly, then got over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis.asyncio
from redis.exceptions import ClusterDownError, MovedError

from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.redis_calls import CatalogDown, translated
from tests.registry.house import publish


@pytest.fixture
async def metadata(metadata_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """The server itself, whose settings are put back."""
    client = connect_redis(metadata_url)
    yield client
    await client.replicaof("NO", "ONE")
    await client.config_set("maxmemory", 0)
    await client.config_set("maxmemory-policy", "noeviction")
    await client.aclose()


async def _fill(metadata: redis.asyncio.Redis) -> None:
    await metadata.config_set("maxmemory", 1)


async def _make_read_only(metadata: redis.asyncio.Redis) -> None:
    await metadata.replicaof("127.0.0.1", "1")


@pytest.mark.parametrize(("spoil", "word"), [(_fill, "maxmemory"), (_make_read_only, "read only")])
async def test_changes_that_cannot_be_indexed_are_refused_and_reads_go_on(
    registry: Registry,
    metadata: redis.asyncio.Redis,
    spoil: Callable[[redis.asyncio.Redis], Awaitable[None]],
    word: str,
) -> None:
    async def versions() -> list[int]:
        found = await registry.catalog.find("default/sql", "all")
        return [version.version for version in found.versions]

    await publish(registry, "sql", 1)
    await spoil(metadata)
    with pytest.raises(CatalogDown, match=word):
        await publish(registry, "sql", 2)
    with pytest.raises(CatalogDown, match=word):
        await registry.indexer.rebuild()
    assert await versions() == [1]
    await metadata.replicaof("NO", "ONE")
    await metadata.config_set("maxmemory", 0)
    await registry.indexer.repair(0.0)
    assert (await publish(registry, "sql", 2)).version.version == 2
    assert await versions() == [1, 2]


async def test_a_server_that_may_drop_keys_is_refused_at_the_start_and_named_later(
    registry: Registry, metadata: redis.asyncio.Redis
) -> None:
    await metadata.config_set("maxmemory-policy", "allkeys-lru")
    await registry.indexer.start()
    await metadata.config_set("maxmemory", 1 << 30)
    for check in (registry.indexer.start, registry.indexer.measure):
        with pytest.raises(CatalogDown, match="noeviction"):
            await check()


@pytest.mark.parametrize("kind", [MovedError, ClusterDownError])
async def test_a_node_of_a_cluster_is_said_to_be_one(kind: type[MovedError]) -> None:
    with pytest.raises(CatalogDown, match=r"cluster.*without cluster mode, or Sentinel"):
        async with translated():
            raise kind("1234 127.0.0.1:7001")


async def test_callers_do_not_learn_where_the_metadata_server_is_and_the_log_does() -> None:
    client = connect_redis("redis://127.0.0.1:1")
    with pytest.raises(CatalogDown) as refused:
        async with translated():
            await client.ping()
    assert "127.0.0.1" not in refused.value.message
    assert "127.0.0.1:1" in refused.value.for_log
    await client.aclose()


async def test_who_finds_a_replica_asks_the_address_again(metadata: redis.asyncio.Redis) -> None:
    before = await metadata.client_id()
    await _make_read_only(metadata)
    with pytest.raises(redis.exceptions.ReadOnlyError):
        await metadata.set("key", "value")
    assert await metadata.client_id() != before
