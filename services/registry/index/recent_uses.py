"""When adapters were last used, in Redis: one set for each tenant, filled from reports of usage.

If Redis loses them, adapters count as used when they were published.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import redis.asyncio

from loraplex_services.common.limits import EPHEMERAL_S
from loraplex_services.registry.index.redis_calls import PREFIX, text, translated, wait

_FORGOTTEN_AT_ONCE = 1000


class RecentUses:
    """Every method raises CatalogDown if Redis is unavailable."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client

    async def note(self, scopes: Iterable[str]) -> None:
        """Note that adapters were used now. Those that no ephemeral version can have are
        forgotten."""
        now_s = time.time()
        by_tenant: dict[str, dict[str, float]] = {}
        for scope in scopes:
            by_tenant.setdefault(scope.partition("/")[0], {})[scope] = now_s
        async with translated(), self._redis.pipeline(transaction=False) as pipe:
            for tenant, used in by_tenant.items():
                key = self._key(tenant)
                pipe.zadd(key, used)
                pipe.zremrangebyscore(key, "-inf", now_s - EPHEMERAL_S.most)
                pipe.expire(key, int(EPHEMERAL_S.most))
            await pipe.execute()

    async def of_tenant(self, tenant: str) -> dict[str, float]:
        """Unix time of the last use of each adapter that was used."""
        async with translated():
            pairs = await wait(self._redis.zrange(self._key(tenant), 0, -1, withscores=True))
        return {text(scope): used_s for scope, used_s in pairs}

    async def forget(self, tenant: str, scopes: Iterable[str]) -> None:
        """Forget these adapters."""
        members = list(scopes)
        for at in range(0, len(members), _FORGOTTEN_AT_ONCE):
            async with translated():
                some = members[at : at + _FORGOTTEN_AT_ONCE]
                await wait(self._redis.zrem(self._key(tenant), *some))

    def _key(self, tenant: str) -> str:
        return f"{PREFIX}uses:{tenant}"
