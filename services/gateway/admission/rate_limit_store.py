"""Stores the token buckets of tenants: in this process for one gateway, in Redis for several.

Each gateway also registers in Redis once per second, so that all know how many share a tenant's
limits. While Redis is unavailable, each gateway applies an equal part of the limits itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import redis.asyncio
from redis.exceptions import RedisError

from loraplex_services.common.redis_url import connect_redis
from loraplex_services.gateway.admission.token_buckets import Bucket, Grant, capacity_of
from loraplex_services.gateway.clock import now_s

logger = logging.getLogger(__name__)

SIGN_INTERVAL_S = 1.0
GONE_S = 5.0
"""A gateway that has not registered for this long no longer counts."""
HELD_S = 3.0
"""A lease of sequences that is not renewed expires after this many seconds."""
_PREFIX = "loraplex:gateway:"
_MEMBERS = f"{_PREFIX}members"
_RETRY_S = 1.0
_ANSWER_S = 1.0
"""Requests wait for the answer: if it takes longer, Redis counts as unavailable."""

# The clock is the server's own: gateways need not agree on the time.
_ASK = """
local now = redis.call('TIME')
local now_s = tonumber(now[1]) + tonumber(now[2]) / 1e6
local rate, need, extra, returned, capacity =
  tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local state = redis.call('HMGET', KEYS[1], 'level', 'filled_s')
local level = tonumber(state[1]) or capacity
local filled_s = tonumber(state[2]) or now_s
level = math.min(level + math.max(now_s - filled_s, 0) * rate + returned, capacity)
local missing = math.min(need, capacity) - level
local amount, wait_s = 0, 0
if missing > 1e-9 then
  wait_s = missing / rate
else
  amount = need + math.min(extra, math.max(level - need, 0))
  level = level - amount
end
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level),
  'filled_s', string.format('%.6f', math.max(now_s, filled_s)))
redis.call('PEXPIRE', KEYS[1], math.ceil((capacity - level) / rate * 1000) + 60000)
return {string.format('%.6f', amount), string.format('%.6f', wait_s)}
"""

_HOLD = """
local now = redis.call('TIME')
local now_s = tonumber(now[1]) + tonumber(now[2]) / 1e6
local mine, limit, want, running, ttl_s =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local held, wanted, others = 0, 0, 0
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local has, wants, ends = entries[i + 1]:match('^(%S+) (%S+) (%S+)$')
  if tonumber(ends) < now_s then
    redis.call('HDEL', KEYS[1], entries[i])
  elseif entries[i] ~= mine then
    held = held + tonumber(has)
    wanted = wanted + tonumber(wants)
    if tonumber(wants) > 0 then others = others + 1 end
  end
end
local part = math.max(math.floor(limit / (others + 1)), 1)
local share = math.max(math.min(want, math.max(part, limit - wanted), limit - held), 0)
redis.call('HSET', KEYS[1], mine,
  string.format('%d %d %.6f', math.max(share, running), want, now_s + ttl_s))
redis.call('EXPIRE', KEYS[1], 60)
return share
"""

_SIGN = """
local now_s = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now_s, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_s - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])
"""


class RateLimitStore(Protocol):
    """Token buckets by name, and leases of sequences by tenant."""

    async def ask(
        self, name: str, rate: float, need: float, extra: float, returned: float
    ) -> Grant: ...

    async def hold(self, tenant: str, limit: int, want: int, running: int) -> int:
        """Lease up to `want` of a tenant's `limit` sequences; `running` of them are in use."""

    @property
    def num_gateways(self) -> int:
        """Gateways that share the limits, this one included."""

    @property
    def is_shared(self) -> bool:
        """True while all gateways use the same buckets."""

    async def run(self) -> None:
        """Keep `num_gateways` up to date until cancelled."""

    async def close(self) -> None:
        """Close connections."""


def open_rate_limit_store(metadata_url: str, gateway_id: str) -> RateLimitStore:
    """The store of one gateway: in Redis if there is one that several gateways share."""
    if not metadata_url:
        return LocalRateLimitStore()
    return RedisRateLimitStore(connect_redis(metadata_url), gateway_id)


class LocalRateLimitStore:
    """Buckets in this process, each with the rate divided by `num_gateways`."""

    def __init__(self, now: Callable[[], float] = now_s) -> None:
        self._now = now
        self._buckets: dict[str, Bucket] = {}
        self.num_gateways = 1
        self.is_shared = False

    async def ask(
        self, name: str, rate: float, need: float, extra: float, returned: float
    ) -> Grant:
        """Never fails; grants from this gateway's part of the rate."""
        rate /= self.num_gateways
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(capacity_of(rate), self._now())
        return bucket.ask(rate, need, extra, returned, self._now())

    async def hold(self, tenant: str, limit: int, want: int, running: int) -> int:
        """This gateway's equal part of the limit."""
        return min(want, max(limit // self.num_gateways, 1))

    async def run(self) -> None:
        """Returns immediately: nothing changes by itself."""

    async def close(self) -> None:
        """There is nothing to close."""


class RedisRateLimitStore:
    """Buckets in Redis; local ones while Redis is unavailable."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        gateway_id: str,
    ) -> None:
        self._client = client
        self._gateway_id = gateway_id
        self._ask: Any = client.register_script(_ASK)
        self._sign: Any = client.register_script(_SIGN)
        self._hold: Any = client.register_script(_HOLD)
        self._local = LocalRateLimitStore()
        self._away_until_s = 0.0
        """When Redis is asked again; 0 = it answered last time."""

    @property
    def num_gateways(self) -> int:
        """The number of gateways when last counted."""
        return self._local.num_gateways

    @property
    def is_shared(self) -> bool:
        """False for a second after Redis failed to answer."""
        return now_s() >= self._away_until_s

    async def ask(
        self, name: str, rate: float, need: float, extra: float, returned: float
    ) -> Grant:
        """Ask Redis; after a failure the local buckets answer for a second."""
        if self.is_shared:
            arguments = [rate, need, extra, returned, capacity_of(rate)]
            answer = await self._tried(self._ask([f"{_PREFIX}bucket:{name}"], arguments))
            if answer is not None:
                return Grant(float(answer[0]), float(answer[1]))
        return await self._local.ask(name, rate, need, extra, returned)

    async def hold(self, tenant: str, limit: int, want: int, running: int) -> int:
        """Ask Redis; while it is unavailable, use this gateway's part."""
        if self.is_shared:
            arguments = [self._gateway_id, limit, want, running, HELD_S]
            leased = await self._tried(self._hold([f"{_PREFIX}held:{tenant}"], arguments))
            if leased is not None:
                return int(leased)
        return await self._local.hold(tenant, limit, want, running)

    async def run(self) -> None:
        """Register this gateway regularly until cancelled."""
        while True:
            count = await self._tried(self._sign([_MEMBERS], [self._gateway_id, GONE_S]))
            if count is not None:
                self._local.num_gateways = max(int(count), 1)
            await asyncio.sleep(SIGN_INTERVAL_S)

    async def close(self) -> None:
        """Close the client; this gateway's registration expires by itself."""
        await self._client.aclose()

    async def _tried(self, call: Awaitable[Any]) -> Any:
        """The answer; None if Redis is unavailable."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await call
            self._away_until_s = 0.0
            return answer
        except (RedisError, OSError) as error:
            if not self._away_until_s:
                logger.warning(
                    "redis unavailable: limits are applied by this gateway alone",
                    extra={"problem": type(error).__name__},
                )
            self._away_until_s = now_s() + _RETRY_S
            return None
