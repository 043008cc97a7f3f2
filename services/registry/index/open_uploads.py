"""Unfinished uploads in Redis: one hash for each tenant, so that quotas count what they will store.

If Redis loses them, the uploads that were in progress no longer count.
"""

from __future__ import annotations

import time

import redis.asyncio

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import MAX_OPEN_UPLOADS_PER_TENANT
from loraplex_services.registry.index.redis_calls import PREFIX, translated, wait

MAX_AGE_S = 24 * 3600.0
"""How long the bytes of an unfinished upload are kept."""

_SUM = """
local num_uploads, num_bytes = 0, 0
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local size, begun_s = string.match(entries[i + 1], '(%d+) (%d+)')
  if tonumber(begun_s) < tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], entries[i])
  elseif entries[i] ~= ARGV[1] then
    num_uploads, num_bytes = num_uploads + 1, num_bytes + tonumber(size)
  end
end
return {num_uploads, string.format('%.0f', num_bytes)}
"""
"""Number and bytes of the uploads of one tenant, but for the upload ARGV[1]; forgets those that
began before ARGV[2]. In Redis, because a thousand entries would stop the event loop for
milliseconds."""


class OpenUploads:
    """Every method raises CatalogDown if Redis is unavailable."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._sum = client.register_script(_SUM)

    async def num_bytes(self, tenant: str, but: str = "") -> int:
        """Declared bytes of a tenant's unfinished uploads, except one of them.

        Raises: ResourceExhausted if the others already reach the limit.
        """
        async with translated():
            num_uploads, num_bytes = await self._sum(
                keys=[self._key(tenant)], args=[but, time.time() - MAX_AGE_S]
            )
        if num_uploads >= MAX_OPEN_UPLOADS_PER_TENANT:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {num_uploads} unfinished uploads; finish some, or wait for "
                "their end after a day",
                reason="TOO_MANY_UPLOADS",
            )
        return int(num_bytes)

    async def note(self, tenant: str, upload: str, num_bytes: int) -> None:
        """Note that an upload begins or continues."""
        key = self._key(tenant)
        async with translated(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, upload, f"{num_bytes} {time.time():.0f}")
            pipe.expire(key, int(MAX_AGE_S))
            await pipe.execute()

    async def forget(self, tenant: str, upload: str) -> None:
        """Note that an upload was published or refused."""
        async with translated():
            await wait(self._redis.hdel(self._key(tenant), upload))

    def _key(self, tenant: str) -> str:
        return f"{PREFIX}open-uploads:{tenant}"
