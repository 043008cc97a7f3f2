"""Counts of usage in Redis: one hash for each day."""

from __future__ import annotations

from collections.abc import Mapping

import redis.asyncio

from loraplex_services.registry.index.redis_calls import PREFIX, text, translated

KEPT_DAYS = 40
"""How long Redis keeps a day."""
_FIELDS_AT_ONCE = 1000
_BEGUN = "begun"
"""A field that keeps the hash of a day without counts."""
_ADD_USAGE = """
if not redis.call('SET', KEYS[1], 1, 'NX', 'EX', 86400) then return 0 end
for i = 1, #ARGV, 3 do redis.call('HINCRBY', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
return 1
"""


class UsageCounters:
    """Every method raises CatalogDown if Redis is unavailable."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._add_usage = client.register_script(_ADD_USAGE)

    async def has(self, day: str) -> bool:
        """Whether there are counts of a day."""
        async with translated():
            return bool(await self._redis.exists(f"{PREFIX}usage:{day}"))

    async def of_day(self, day: str, begin: str = "") -> dict[str, int]:
        """The counts of a day by field, of fields that begin with `begin`, which has no
        wildcards."""
        async with translated():
            found = self._redis.hscan_iter(
                f"{PREFIX}usage:{day}", match=f"{begin}*", count=_FIELDS_AT_ONCE
            )
            numbers = {text(name): int(number) async for name, number in found}
        numbers.pop(_BEGUN, None)
        return numbers

    async def seed(self, day: str, counts: Mapping[str, int]) -> None:
        """Begin a day with counts that were copied before, where nothing was counted since."""
        key = f"{PREFIX}usage:{day}"
        async with translated(), self._redis.pipeline(transaction=True) as pipe:
            for name, number in {_BEGUN: 0, **counts}.items():
                pipe.hsetnx(key, name, str(number))
            pipe.expire(key, KEPT_DAYS * 24 * 3600)
            await pipe.execute()

    async def add(self, report_id: str, days: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of one report, once."""
        arguments = [
            part
            for day, counts in days.items()
            for name, number in counts.items()
            for part in (f"{PREFIX}usage:{day}", name, number)
        ]
        async with translated():
            await self._add_usage(keys=[f"{PREFIX}usage-report:{report_id}"], args=arguments)
