"""Which tenants there are."""

from __future__ import annotations

import redis

from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.records import TenantRecord
from tests.registry.house import publish


async def test_tenants_that_were_set_or_own_an_adapter_are_listed(registry: Registry) -> None:
    for name in ("a/x", "a-b/x", "a/y", "a0/x", "b/x"):
        await publish(registry, name, 1)
    await registry.tenants.set(TenantRecord("no-adapters"))
    assert await registry.tenants.names() == {"a", "a-b", "a0", "b", "no-adapters"}


async def test_the_tenants_that_were_set_are_listed_without_the_index(
    registry: Registry, metadata_url: str
) -> None:
    await publish(registry, "a/x", 1)
    await registry.tenants.set(TenantRecord("b"))
    redis.Redis.from_url(metadata_url).flushall()
    assert await registry.tenants.names() == {"b"}
