"""Garbage is collected by itself: by one registry of all, once in an interval."""

from __future__ import annotations

import asyncio

import redis.asyncio

from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.redis_calls import PREFIX
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.maintenance.housekeeping import collect_once, collect_regularly
from tests.registry.house import ANY_AGE_S, publish

ORPHAN = layout.blob("ab" * 32)


def _eager(registry: Registry) -> Collector:
    """One that finds everything old."""
    return Collector(registry.store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S)


async def test_of_many_registries_one_claims_an_interval(
    registry: Registry, metadata_url: str
) -> None:
    other = Catalog(connect_redis(metadata_url))
    turns = await asyncio.gather(
        *(catalog.claim_interval("gc", 3600.0) for catalog in (registry.catalog, other) * 4)
    )
    assert sum(turns) == 1
    raw = redis.asyncio.Redis.from_url(metadata_url)
    assert 0 < await raw.pttl(f"{PREFIX}turn:gc") <= 3_600_000
    await raw.delete(f"{PREFIX}turn:gc")
    assert await other.claim_interval("gc", 3600.0)
    await raw.aclose()
    await other.close()


async def test_a_collection_removes_orphans_keeps_the_rest_and_is_audited(
    registry: Registry,
) -> None:
    done = await publish(registry, "sql", 1)
    await registry.store.put(ORPHAN, b"nobody's")
    await collect_once(_eager(registry), registry.audit)
    assert await registry.store.head(ORPHAN) is None
    assert await registry.store.head(layout.blob(done.version.digest)) is not None
    entries, _ = await registry.audit.page("", 1)
    assert (entries[0].actor, entries[0].action) == ("registry", "gc")
    await collect_once(_eager(registry), registry.audit)
    assert (await registry.audit.page("", 1))[0] == entries


async def test_collection_goes_on_by_itself_until_it_is_stopped(
    registry: Registry,
) -> None:
    collecting = asyncio.create_task(
        collect_regularly(
            registry.catalog, _eager(registry), registry.audit, registry.retention, 0.01
        )
    )
    for _ in range(2):
        await registry.store.put(ORPHAN, b"nobody's")
        async with asyncio.timeout(20):
            while await registry.store.head(ORPHAN) is not None:
                await asyncio.sleep(0.01)
    collecting.cancel()


async def test_an_interval_of_zero_means_never(registry: Registry) -> None:
    await collect_regularly(
        registry.catalog, _eager(registry), registry.audit, registry.retention, 0.0
    )
    assert await registry.catalog.claim_interval("gc", 1.0)
