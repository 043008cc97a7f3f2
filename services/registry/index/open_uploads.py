"""Uploads under way, in Redis: one hash for each tenant, so that quotas count what they will store.

If Redis loses them, the uploads that were under way then count no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import redis.asyncio

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import MAX_OPEN_UPLOADS_PER_TENANT
from loraplex_services.registry.index.redis_calls import text, translated, wait

MAX_AGE_S = 24 * 3600.0
"""How long the bytes of an unfinished upload are kept."""


class OpenUploads:
    """Every method raises CatalogDown if Redis is unavailable."""

    def __init__(
        self, client: redis.asyncio.Redis, prefix: str, now: Callable[[], float] = time.time
    ) -> None:
        self._redis = client
        self._prefix = prefix
        self._now = now

    async def num_bytes(self, tenant: str, but: str = "") -> int:
        """Declared bytes of a tenant's uploads under way, without one of them.

        Raises: ResourceExhausted if there are as many of others as there may be.
        """
        sizes = await self._sizes(tenant)
        sizes.pop(but, None)
        if len(sizes) >= MAX_OPEN_UPLOADS_PER_TENANT:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {len(sizes)} unfinished uploads; finish some, or wait for "
                "their end after a day",
                reason="TOO_MANY_UPLOADS",
            )
        return sum(sizes.values())

    async def note(self, tenant: str, upload: str, num_bytes: int) -> None:
        """An upload begins, or continues."""
        key = self._key(tenant)
        async with translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, upload, f"{num_bytes} {self._now():.0f}")
            pipe.expire(key, int(MAX_AGE_S))
            await pipe.execute()

    async def forget(self, tenant: str, upload: str) -> None:
        """An upload is published or refused."""
        async with translated():
            await wait(self._redis.hdel(self._key(tenant), upload))

    async def _sizes(self, tenant: str) -> dict[str, int]:
        key = self._key(tenant)
        async with translated():
            found = await wait(self._redis.hgetall(key))
            entries = {text(name): text(value).split() for name, value in found.items()}
            oldest_s = self._now() - MAX_AGE_S
            if old := [name for name, (_, begun_s) in entries.items() if float(begun_s) < oldest_s]:
                await wait(self._redis.hdel(key, *old))
        return {name: int(size) for name, (size, _) in entries.items() if name not in old}

    def _key(self, tenant: str) -> str:
        return f"{self._prefix}open-uploads:{tenant}"
