"""The limits of tenants, read from the registry and cached briefly.

While the registry is unavailable the last answer is used. An unknown tenant has no limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from loraplex.api.tenants import TenantLimits
from loraplex.errors import LoraplexError
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.shared_work import SharedWork
from loraplex_services.gateway.clock import now_s

logger = logging.getLogger(__name__)

FRESH_S = 5.0
MAX_REMEMBERED = 100_000


Ask = Callable[[str], Awaitable[TenantLimits]]
"""Tenant -> its limits. Raises LoraplexError if the registry cannot be reached."""


class TenantDirectory:
    """Caches limits; an old answer is used while a new one is requested."""

    def __init__(self, ask: Ask, now: Callable[[], float] = now_s) -> None:
        self._ask = ask
        self._now = now
        self._known: LruCache[str, tuple[float, TenantLimits]] = LruCache(MAX_REMEMBERED)
        self._asking: SharedWork[str, TenantLimits] = SharedWork()

    async def limits(self, tenant: str) -> TenantLimits:
        """The limits of a tenant. Waits only if the tenant is not known yet."""
        known = self._known.get(tenant)
        if known is not None and self._now() - known[0] < FRESH_S:
            return known[1]
        asking = self._asking.begin(tenant, lambda: self._asked(tenant))
        return known[1] if known is not None else await asyncio.shield(asking)

    async def close(self) -> None:
        """Cancel the requests to the registry."""
        await self._asking.close()

    async def _asked(self, tenant: str) -> TenantLimits:
        """Mutates: known."""
        before = self._known.get(tenant)
        limits = before[1] if before is not None else TenantLimits(tenant)
        try:
            limits = await self._ask(tenant)
        except LoraplexError as error:
            logger.info(
                "tenant limits not refreshed", extra={"tenant": tenant, "reason": error.reason}
            )
        self._known.put(tenant, (self._now(), limits))
        return limits
